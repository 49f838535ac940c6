"""Models on their way into a quantized bundle: calibrated before they are compiled, measured afterwards."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from specrun.calibration.activations import collect
from specrun.calibration.corpus import Corpus
from specrun.calibration.plan import Plan, make_plan
from specrun.calibration.products import Graph
from specrun.calibration.progress_store import ProgressStore
from specrun.calibration.quality import describe, measure, require_acceptance, require_quality
from specrun.calibration.report import render_report
from specrun.engines import ort
from specrun.engines.acceptance import Guess, Reading, tokens_per_round
from specrun.engines.compiler import Compile, Compiler
from specrun.engines.manifest import TOKENIZER_FILE, Acceptance, ModelEntry, Quality
from specrun.engines.vocabulary import load_tokenizer
from specrun.engines.whole_text import MAX_TEXT_TOKENS

logger = logging.getLogger(__name__)

DRAFT_WINDOWS = 12  # of text, that drafts are measured on

# Compiles what a draft consists of into a directory, and returns its guess.
MakeGuess = Callable[[Compile, Path], Guess]


class Quantization:
    """Of one bundle: what becomes of target and drafts, and what that costs. Everything is measured with ONNX Runtime's
    CPU provider: a build needs no GPU. Does nothing for precisions that do not quantize."""

    def __init__(self, compiler: Compiler, text: Path | None, accept_loss: bool, k: int, bundle: Path) -> None:
        """`text`: to measure with, None: built in. `accept_loss`: however much is lost. `k`: positions that drafts
        guess. `bundle`: on its way, holds intermediate files."""
        self._compiler, self._text, self._accept_loss, self._k = compiler, text, accept_loss, k
        self._scratch = bundle / "measuring"
        self.quality: Quality | None = None
        self.acceptance: dict[str, Acceptance] = {}
        self._name = ""
        self._plan: Plan | None = None
        self._readings: tuple[Reading, Reading] | None = None  # of the target as it was, and quantized

    def plan(self, graph: Path, directory: Path, model: ModelEntry) -> Plan | None:
        """How the activations of the exported `graph` are quantized, where the precision asks for it. `directory`: of
        the model in the bundle, with its tokenizer. Raises CorpusError."""
        if not self._compiler.precision.activations:
            return None
        windows = self._corpus(directory, model).calibration
        store = ProgressStore(self._compiler.cache / "calibration", graph, windows)
        plan = store.plan()
        if plan is None:
            progress = _progress(f"{model.name}: calibrating", len(windows))
            with self._scratch_directory() as scratch:
                activations = collect(graph, model.signature, windows, scratch, store, progress)
            progress = _progress(f"{model.name}: searching scales", len(activations))
            plan = make_plan(Graph(graph), activations, progress)
            store.keep_plan(plan)
        quantized = sum(each.quantized for each in plan.values())
        logger.info(
            "%s: %d of %d activations in 8 bits, the others are too sensitive", model.name, quantized, len(plan)
        )
        return plan

    def measure_target(self, graph: Path, directory: Path, model: ModelEntry, plan: Plan | None) -> None:
        """Compare what quantization makes of `graph` with the graph itself. `model`: with the taps of the graph. Raises
        QualityError if it lost too much, unless that is to be accepted, or CorpusError."""
        if not self._compiler.precision.quantized:
            return
        self._name, self._plan = model.name, plan
        windows = self._corpus(directory, model).held_out
        with self._scratch_directory() as scratch:
            engines = scratch / "reference.onnx", scratch / "measured.onnx"
            ort.compile_graph(graph, engines[0])
            self._compiler.compile_for_measuring(graph, engines[1], plan)
            progress = _progress(f"{model.name}: measuring what was lost, windows of text", len(windows))
            self.quality = measure(*engines, model.signature, windows, model.vocabulary_size, progress)
            first, second = (
                Reading.of(engine, model.signature, windows[:DRAFT_WINDOWS], model.vocabulary_size)
                for engine in engines
            )
            self._readings = first, second
        logger.info("%s: %s", model.name, describe(self.quality))
        if not self._accept_loss:
            require_quality(self.quality, model.name, self._compiler.precision.name)

    def measure_draft(self, kind: str, make: MakeGuess, plan: Plan | None = None) -> None:
        """Whether the quantized draft guesses the quantized target as well as before. Raises QualityError."""
        if self._readings is None:
            return
        lengths = []
        measured = partial(self._compiler.compile_for_measuring, plan=plan)
        compiled: tuple[Compile, Compile] = (ort.compile_graph, measured)
        for reading, compile_graph in zip(self._readings, compiled, strict=True):
            with self._scratch_directory() as scratch:
                lengths.append(tokens_per_round(reading.agreement(make(compile_graph, scratch)), self._k))
        self.acceptance[kind] = Acceptance(*lengths)
        logger.info("%s: about %.2f tokens per round, %.2f before quantization", kind, lengths[1], lengths[0])
        if not self._accept_loss:
            require_acceptance(self.acceptance[kind], kind, self._compiler.precision.name)

    def report(self) -> str | None:
        """What was lost, as HTML."""
        if self.quality is None:
            return None
        return render_report(self._name, self._compiler.precision.name, self.quality, self.acceptance, self._plan)

    @contextlib.contextmanager
    def _scratch_directory(self) -> Iterator[Path]:
        self._scratch.mkdir()
        try:
            yield self._scratch
        finally:
            shutil.rmtree(self._scratch)

    def _corpus(self, directory: Path, model: ModelEntry) -> Corpus:
        longest = min(MAX_TEXT_TOKENS, model.context.limit)
        return Corpus.of(load_tokenizer(directory / TOKENIZER_FILE), self._text, longest)


def _progress(what: str, count: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if done % max(1, count // 4) == 0 or done == count:
            logger.info("%s: %d of %d", what, done, count)

    return report
