"""The models of a bundle, put into it one after the other: exported, quantized, compiled."""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir

from specrun.calibration.plan import Plan
from specrun.calibration.texts import TEXTS
from specrun.engines.acceptance import Guess, guess_of_head, guess_of_model
from specrun.engines.backend import (
    EARLY_EXIT_MODEL,
    TENSORRT_BACKENDS,
    engine_file,
    one_sequence_file,
)
from specrun.engines.build_options import BuildOptions
from specrun.engines.card import ExportCard
from specrun.engines.compiler import Compile, Compiler
from specrun.engines.exit_choice import choose_exit, compile_exit, skipped_layers
from specrun.engines.manifest import (
    CHAT_TEMPLATE_FILE,
    DRAFT,
    DRAFT_MODEL,
    EARLY_EXIT,
    ENGINE_FILE,
    TARGET,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    HeadEntry,
    ModelEntry,
)
from specrun.engines.quantization import Quantization
from specrun.engines.shared_weights import share_weights
from specrun.engines.source import Source
from specrun.engines.vocabulary import load_tokenizer
from specrun.export.graph import PRECISIONS as DTYPES
from specrun.export.head_graph import write_head
from specrun.export.heads import Head
from specrun.export.taps import add_taps

logger = logging.getLogger(__name__)


class BundleParts:
    """Puts the models of a bundle into it, one after the other."""

    def __init__(self, bundle: Path, options: BuildOptions, compiler: Compiler, capacity: int) -> None:
        self._bundle, self._options, self._compiler, self._capacity = bundle, options, compiler, capacity
        self.quantization = Quantization(compiler, options.text, options.accept_quality_loss, options.k, bundle)

    def add_target(
        self, source: Source, taps: tuple[int, ...], early_exit: tuple[int, ...] | int | None
    ) -> tuple[ExportCard, dict[str, HeadEntry]]:
        """The compiled target, with the outputs that heads read and the early exit if it has one."""
        with _exported(source, TARGET, self._bundle, self._options) as export:
            card = ExportCard.read(export)
            directory, graph = self._bundle / TARGET, export / ENGINE_FILE
            tapped = replace(card.model, signature=replace(card.model.signature, taps=taps))
            if taps:
                graph = export / "tapped.onnx"
                model = ir.load(export / ENGINE_FILE)
                add_taps(model, tapped.signature)
                ir.save(model, graph)  # on the export's weights
                del model
            self._say_compiling(TARGET)
            plan = self.quantization.plan(graph, directory, card.model)
            self.quantization.measure_target(graph, directory, tapped, plan)
            self._compiler.compile(graph, directory / engine_file(self._options.backend), self._capacity, plan)
            if taps:
                graph.unlink()
            if early_exit is None:
                return card, {}
            return card, {EARLY_EXIT: self._add_exit(early_exit, export / ENGINE_FILE, card.model, plan)}

    def _add_exit(self, asked: tuple[int, ...] | int, export: Path, target: ModelEntry, plan: Plan | None) -> HeadEntry:
        signature = target.signature
        directory, compiler = self._bundle / TARGET, self._compiler
        if asked == 0:
            tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
            texts = [tokenizer.encode(text).ids for text in TEXTS]
            measuring = partial(compiler.compile_for_measuring, plan=plan)
            skipped = choose_exit(export, signature, texts, self._options.k, directory, measuring)
        else:
            skipped = skipped_layers(asked, signature.num_layers)
        signature = replace(signature, skipped=skipped)

        def make_guess(compile_graph: Compile, scratch: Path) -> Guess:
            compile_exit(export, scratch / ENGINE_FILE, signature, compile_graph)
            return guess_of_model(scratch / ENGINE_FILE, signature, target.vocabulary_size)

        self.quantization.measure_draft(EARLY_EXIT, make_guess, plan)
        engine = directory / engine_file(compiler.backend, EARLY_EXIT_MODEL)
        compile_exit(export, engine, signature, partial(compiler.compile, capacity=self._capacity, plan=plan))
        kept = signature.num_layers - len(skipped)
        if compiler.backend in TENSORRT_BACKENDS:
            logger.info("early exit: %d of %d layers, with weights of its own", kept, signature.num_layers)
        else:
            one, target_engine = one_sequence_file(engine), directory / engine_file(compiler.backend)
            if one.is_file():
                share_weights(one, target_engine)
            own = share_weights(engine, target_engine)
            logger.info("early exit: %d of %d layers, %d bytes of weights of its own", kept, signature.num_layers, own)
        return HeadEntry(
            name=f"{kept} of {signature.num_layers} layers",
            parameters=0,
            taps=(),
            signature=signature,
            positions=0,
            capacity=0,
            reduced_vocabulary=False,
        )

    def add_head(self, kind: str, head: Head, name: str, target: ModelEntry) -> HeadEntry:
        """Medusa heads or an EAGLE head. `target`: with its taps."""
        logger.info("%s: exporting %s parameters", name, f"{head.parameters:,}")
        directory, export = self._bundle / kind, self._bundle / f"{kind}-export"
        directory.mkdir()
        export.mkdir()
        entry = write_head(head, name, export, DTYPES[self._compiler.precision.export], self._capacity)

        def make_guess(compile_graph: Compile, scratch: Path) -> Guess:
            for file in sorted(export.glob("*.onnx")):
                compile_graph(file, scratch / file.name)
            if entry.reduced_vocabulary:
                shutil.copyfile(export / VOCABULARY_FILE, scratch / VOCABULARY_FILE)
            return guess_of_head(kind, scratch, entry, target)

        self.quantization.measure_draft(kind, make_guess)
        for file in sorted(export.glob("*.onnx")):
            engine = directory / engine_file(self._compiler.backend, file.stem)
            self._compiler.compile(file, engine, entry.capacity)
        if entry.reduced_vocabulary:
            shutil.copyfile(export / VOCABULARY_FILE, directory / VOCABULARY_FILE)
        shutil.rmtree(export)
        return entry

    def add_draft(self, source: Source, capacity: int) -> ExportCard:
        """The compiled draft model and its tokenizer."""
        with _exported(source, DRAFT, self._bundle, self._options) as export:
            card, graph, directory = ExportCard.read(export), export / ENGINE_FILE, self._bundle / DRAFT
            self._say_compiling(DRAFT)
            plan = self.quantization.plan(graph, directory, card.model)

            def make_guess(compile_graph: Compile, scratch: Path) -> Guess:
                compile_graph(graph, scratch / ENGINE_FILE)
                return guess_of_model(scratch / ENGINE_FILE, card.model.signature, card.model.vocabulary_size)

            self.quantization.measure_draft(DRAFT_MODEL, make_guess, plan)
            self._compiler.compile(graph, directory / engine_file(self._options.backend), capacity, plan)
            return card

    def _say_compiling(self, model: str) -> None:
        logger.info("%s: compiling for %s, %s", model, self._options.backend, self._compiler.precision.name)


@contextlib.contextmanager
def _exported(source: Source, name: str, bundle: Path, options: BuildOptions) -> Iterator[Path]:
    """The export of `source`, gone again afterwards if it was made for this; its tokenizer is in `bundle`/`name`."""
    scratch = bundle / f"{name}-export"
    export = source.exported(scratch, options.export_precision)
    directory = bundle / name
    directory.mkdir()
    for file in (TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
        if (export / file).is_file():
            shutil.copyfile(export / file, directory / file)
    yield export
    shutil.rmtree(scratch, ignore_errors=True)
