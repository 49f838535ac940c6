"""A draft head as ONNX graphs with the tensors of the contract, validated against PyTorch."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from specrun.engines.backend import FUSE
from specrun.engines.context import Context
from specrun.engines.manifest import ENGINE_FILE, VOCABULARY_FILE, HeadEntry
from specrun.engines.signature import (
    BATCH,
    CACHE_LENGTH,
    FEATURES,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    TOKENS,
    TREE_MASK,
    Signature,
    past,
    present,
)
from specrun.export.attention import ATTENTION, ScatterCache, cache_mask
from specrun.export.axes import name_axes
from specrun.export.eagle import EagleHead
from specrun.export.fusion import fuse
from specrun.export.heads import Head
from specrun.export.trace import example_inputs, save, to_onnx
from specrun.export.validate import TOLERANCE, TreeValuesError, ValidationError, open_session, require_standard

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class HeadValuesError(ValidationError):
    """Outputs of a head's graph differ from PyTorch's."""


def write_head(head: Head, name: str, directory: Path, dtype: torch.dtype, capacity: int) -> HeadEntry:
    """Write the graphs of `head` into an existing directory. `capacity`: of its KV cache, as far as it can use it.

    Raises TraceError or a ValidationError.
    """
    if head.vocabulary is not None:
        np.save(directory / VOCABULARY_FILE, head.vocabulary.numpy())
    module = head.module.to(dtype)
    signature = None
    if isinstance(module, EagleHead):
        signature = _write_eagle(module, directory)
        capacity = min(capacity, Context(int(module.config.max_position_embeddings), None).limit)
    else:
        _write_stateless(module, module.hidden_size, LOGITS, directory / ENGINE_FILE)
    return HeadEntry(
        name=name,
        parameters=head.parameters,
        taps=head.taps,
        signature=signature,
        positions=0 if isinstance(module, EagleHead) else len(module),
        capacity=capacity if signature is not None else 0,
        reduced_vocabulary=head.vocabulary is not None,
    )


def _write_eagle(head: EagleHead, directory: Path) -> Signature:
    config = head.config
    signature = Signature(
        num_layers=1,
        kv_heads=config.num_key_value_heads,
        head_dim=head.layer.self_attn.head_dim,
        vocab_size=head.shape.draft_vocab_size,
        hidden_size=config.hidden_size,
        taps=(1,),
        reads_features=True,
    )
    if head.shape.version == 3:
        width = len(head.shape.taps) * head.shape.target_hidden_size
        _write_stateless(_Fuse(head), width, FEATURES, directory / f"{FUSE}.onnx")
    config._attn_implementation = ATTENTION
    ids, positions, length, mask, caches = example_inputs(signature, head.fc.weight.dtype)
    features = torch.zeros(*ids.shape, config.hidden_size, dtype=head.fc.weight.dtype)
    inputs = signature.inputs()
    dynamic = torch.export.Dim.DYNAMIC
    axes = [{at: dynamic for at, axis in enumerate(shape) if isinstance(axis, str)} for shape in inputs.values()]
    graph = to_onnx(
        _EagleContract(head),
        (ids, positions, length, mask, features, caches),
        (*axes[:5], tuple(axes[5:])),
        list(inputs),
        list(signature.outputs()),
    )
    fuse(graph)
    name_axes(graph, signature)
    save(graph, directory / ENGINE_FILE)
    require_standard(directory / ENGINE_FILE)
    config._attn_implementation = "sdpa"
    worst = _compare_eagle(head, signature, directory / ENGINE_FILE)
    logger.info("the head's outputs equal PyTorch's to %.1e of the largest", worst)
    return signature


class _EagleContract(torch.nn.Module):
    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache_length: torch.Tensor,
        tree_mask: torch.Tensor,
        features: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        mask = cache_mask(cache_length, tree_mask, caches[0].shape[2])
        cache = ScatterCache(caches, cache_length)
        states = self.head.states(input_ids, features, position_ids, mask, cache)
        return self.head.logits(states), states, tuple(cache.updated)


class _Fuse(torch.nn.Module):
    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(hidden_states)


def _write_stateless(module: torch.nn.Module, width: int, output: str, path: Path) -> None:
    """A graph from hidden_states [batch, tokens, width] to one output."""
    dtype = next(module.parameters()).dtype
    states = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    dynamic = torch.export.Dim.DYNAMIC
    graph = to_onnx(module, (states,), ({0: dynamic, 1: dynamic},), [HIDDEN_STATES], [output])
    graph.graph.inputs[0].shape = ir.Shape([BATCH, TOKENS, width])
    shape = graph.graph.outputs[0].shape
    assert shape is not None
    graph.graph.outputs[0].shape = ir.Shape([BATCH, TOKENS, *list(shape)[2:]])
    save(graph, path)
    require_standard(path)
    got = open_session(path).run(None, {HIDDEN_STATES: states.numpy()})[0]
    with torch.no_grad():
        _require_equal(got, module(states), str(dtype).removeprefix("torch."), HeadValuesError, path.name)


@torch.no_grad()
def _compare_eagle(head: EagleHead, signature: Signature, path: Path) -> float:
    """A chain in two calls, then two levels of a tree, each against one call of PyTorch without a cache."""
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    session, rng = open_session(path), np.random.default_rng(0)
    shape = (1, signature.kv_heads, 32, signature.head_dim)
    caches = {past(*part): np.zeros(shape, dtype) for part in signature.cache_parts()}
    tokens = rng.integers(0, head.config.vocab_size, 13)
    features = rng.normal(0, 1, (13, signature.hidden_size)).astype(dtype)
    # Rows 0 to 8 are a chain. 9 and 10 follow its end; 11 follows 9, 12 follows 10.
    lines = [list(range(row + 1)) for row in range(9)]
    lines += [[*range(9), 9], [*range(9), 10], [*range(9), 9, 11], [*range(9), 10, 12]]
    worst = 0.0
    for first, last, tree in ((0, 5, 5), (5, 9, 4), (9, 11, 2), (11, 13, 4)):
        base = last - tree
        mask = np.array([[base + column in lines[row] for column in range(tree)] for row in range(first, last)])
        feeds = {
            INPUT_IDS: tokens[None, first:last],
            FEATURES: features[None, first:last],
            POSITION_IDS: np.array([[len(lines[row]) - 1 for row in range(first, last)]]),
            CACHE_LENGTH: np.array([first]),
            TREE_MASK: mask[None],
        }
        names = [LOGITS, HIDDEN_STATES, *(present(*part) for part in signature.cache_parts())]
        logits, states, *updated = session.run(names, {**feeds, **caches})
        caches = dict(zip(caches, updated, strict=True))
        for row in range(first, last):
            line = lines[row]
            causal = torch.ones(len(line), len(line), dtype=torch.bool).tril()[None, None]
            wanted = head.states(
                torch.from_numpy(tokens[None, line]),
                torch.from_numpy(features[None, line]),
                torch.arange(len(line))[None],
                causal,
                None,
            )[:, -1]
            error = TreeValuesError if row >= 9 else HeadValuesError
            for got, reference in ((states, wanted), (logits, head.logits(wanted))):
                worst = max(worst, _require_equal(got[:, row - first], reference, dtype, error, f"row {row}"))
    return worst


def _require_equal(got: Array, wanted: torch.Tensor, dtype: str, error: type[ValidationError], where: str) -> float:
    reference = wanted.float().numpy()
    difference = float(np.abs(got.astype(np.float32) - reference).max() / np.abs(reference).max())
    if not difference <= TOLERANCE[dtype]:
        raise error(f"{where} of the head differs from PyTorch by {difference:.1e} of the largest value")
    return difference
