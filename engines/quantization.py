"""A model's way into a quantized bundle: calibrated before it is compiled, measured afterwards."""

import logging
from collections.abc import Callable
from pathlib import Path

from specrun.calibration.activations import collect
from specrun.calibration.corpus import Corpus
from specrun.calibration.plan import Plan, make_plan
from specrun.calibration.products import Graph
from specrun.calibration.quality import describe, measure, require_quality
from specrun.engines import ort
from specrun.engines.compiler import Compiler
from specrun.engines.manifest import TOKENIZER_FILE, ModelEntry, Quality
from specrun.engines.precision import Precision
from specrun.engines.vocabulary import load_tokenizer
from specrun.engines.whole_text import MAX_TEXT_TOKENS

logger = logging.getLogger(__name__)


def plan_activations(
    graph: Path, directory: Path, model: ModelEntry, precision: Precision, text: Path | None
) -> Plan | None:
    """How the activations of the exported `graph` are quantized, where the precision asks for it. `directory`: of the
    model in the bundle, with its tokenizer. Raises CorpusError."""
    if not precision.activations:
        return None
    windows = _corpus(directory, model, text).calibration
    progress = _progress(f"{model.name}: calibrating", len(windows))
    activations = collect(graph, model.signature, windows, directory, progress)
    progress = _progress(f"{model.name}: searching scales", len(activations))
    plan = make_plan(Graph(graph), activations, progress)
    quantized = sum(each.quantized for each in plan.values())
    logger.info("%s: %d of %d activations in 8 bits, the others are too sensitive", model.name, quantized, len(plan))
    return plan


def measure_loss(
    graph: Path,
    directory: Path,
    model: ModelEntry,
    compiler: Compiler,
    plan: Plan | None,
    text: Path | None,
    accept: bool,
) -> Quality | None:
    """Compare what quantization makes of `graph` with the graph itself; None for precisions without. `directory`: for
    intermediate files. Raises QualityError if it lost too much, unless that is to be accepted, or CorpusError.

    Both are computed by ONNX Runtime's CPU provider: a build needs no GPU."""
    if not compiler.precision.quantized:
        return None
    windows = _corpus(directory, model, text).held_out
    reference, measured = directory / "reference.onnx", directory / "measured.onnx"
    ort.compile_graph(graph, reference)
    compiler.compile_for_measuring(graph, measured, plan)
    progress = _progress(f"{model.name}: measuring what was lost, windows of text", len(windows))
    quality = measure(reference, measured, model.signature, windows, model.vocabulary_size, progress)
    for file in (*directory.glob(f"{reference.name}*"), *directory.glob(f"{measured.name}*")):
        file.unlink()
    logger.info("%s: %s", model.name, describe(quality))
    if not accept:
        require_quality(quality, model.name, compiler.precision.name)
    return quality


def _corpus(directory: Path, model: ModelEntry, text: Path | None) -> Corpus:
    longest = min(MAX_TEXT_TOKENS, model.context.limit)
    return Corpus.of(load_tokenizer(directory / TOKENIZER_FILE), text, longest)


def _progress(what: str, count: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if done % max(1, count // 4) == 0 or done == count:
            logger.info("%s: %d of %d", what, done, count)

    return report
