"""Export: checkpoint in, a directory with graph, weights, tokenizer and card out."""

import gc
import logging
import platform
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
import torch

from specrun.engines.card import CARD_FILE, ExportCard
from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import ENGINE_FILE, ModelEntry
from specrun.engines.memory import require_room
from specrun.engines.signature import BATCH, CAPACITY, TOKENS, TREE
from specrun.engines.staging import staged_directory
from specrun.engines.vocabulary import Vocabulary
from specrun.export.axes import pin_axes
from specrun.export.checkpoint import Checkpoint
from specrun.export.family import context_of
from specrun.export.tokenizer import write_tokenizer
from specrun.export.trace import save, signature_of, trace
from specrun.export.validate import Trial, validate_graph, validate_states, validate_values

logger = logging.getLogger(__name__)

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16}
PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "specrun")


class ExportOptionError(SpecrunError):
    """An option of an export makes no sense."""


def export_model(checkpoint: Checkpoint, out: Path, precision: str, width: int | None, capacity: int | None) -> None:
    """Export into the directory `out`, atomically.

    `width` and `capacity` together make a fully static file (batch 1, that many tokens per call); without
    them all axes stay dynamic. Raises an error of this package that says what is wrong.
    """
    if (width is None) != (capacity is None):
        raise ExportOptionError("got one of --width and --capacity, expected both (a static file) or none")
    pinned = {} if width is None or capacity is None else {BATCH: 1, TOKENS: width, TREE: width, CAPACITY: capacity}
    if pinned and not 0 < pinned[TOKENS] <= pinned[CAPACITY]:
        raise ExportOptionError(f"got --width {width} --capacity {capacity}, expected 0 < width <= capacity")
    # A file with open axes may be used with any capacity, so it must be exact for all positions.
    context = context_of(checkpoint.config)
    context.require(context.positions if capacity is None else capacity, checkpoint.name)
    with staged_directory(out, CARD_FILE) as directory:
        require_room(checkpoint.parameters, checkpoint.parameters, directory)
        write_export(checkpoint, directory, precision, pinned)


def write_export(checkpoint: Checkpoint, directory: Path, precision: str, pinned: dict[str, int]) -> ExportCard:
    """Export into an existing directory. `pinned`: static sizes of axes, or empty."""
    if precision not in PRECISIONS:
        raise ExportOptionError(f"got precision {precision!r}, expected one of {', '.join(PRECISIONS)}")
    name = checkpoint.name
    logger.info("%s: loading %s parameters (%s)", name, f"{checkpoint.parameters:,}", checkpoint.family)
    tokenizer, special_tokens = write_tokenizer(checkpoint, directory)
    model = checkpoint.load(PRECISIONS[precision])
    signature = signature_of(model)

    logger.info("%s: tracing", name)
    graph = trace(model, signature)
    if pinned:
        pin_axes(graph, pinned)
    path = directory / ENGINE_FILE
    save(graph, path)
    logger.info("%s: %s", name, _operators(graph))
    del graph

    logger.info("%s: validating against PyTorch", name)
    dtype = str(model.dtype).removeprefix("torch.")
    validate_graph(path, signature, pinned, dtype)
    worst = validate_values(path, model, signature, Trial.of(pinned, context_of(model.config).limit))
    logger.info("%s: logits equal PyTorch's to %.1e of the largest", name, worst)
    if not pinned:
        validate_states(path, model, signature)

    vocabulary = Vocabulary.of(tokenizer)
    card = ExportCard(
        precision=precision,
        pinned=pinned,
        model=ModelEntry(
            name=name,
            family=checkpoint.family,
            parameters=checkpoint.parameters,
            context=context_of(model.config),
            signature=signature,
            cache_dtype=dtype,
            vocabulary_size=min(vocabulary.size, signature.vocab_size),
            vocabulary_sha256=vocabulary.digest(),
            special_tokens=special_tokens,
            stop_token_ids=checkpoint.stop_token_ids(),
        ),
        versions=build_versions(),
    )
    card.write(directory)
    del model
    gc.collect()
    return card


def build_versions() -> dict[str, str]:
    """Versions of what shapes an exported graph."""
    return {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}


def _operators(graph: ir.Model) -> str:
    kinds = [node.op_type for node in graph.graph]
    shown = ("Attention", "TensorScatter", "RMSNormalization", "RotaryEmbedding")
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in shown if kind in kinds)
    return f"{len(kinds)} nodes ({counts})"
