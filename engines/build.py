"""Build a bundle: export what is not exported yet, compile the graphs, write the manifest."""

import contextlib
import hashlib
import logging
import platform
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx_ir as ir

import specrun.calibration
import specrun.export
from specrun.calibration.plan import Plan
from specrun.calibration.report import render_report
from specrun.calibration.texts import TEXTS
from specrun.engines import tensorrt
from specrun.engines.accept_kernels import architecture_file, compile_kernels, require_architecture
from specrun.engines.backend import (
    BACKENDS,
    EARLY_EXIT_MODEL,
    GPU_BACKENDS,
    ORT,
    TENSORRT_BACKENDS,
    engine_file,
)
from specrun.engines.card import ExportCard
from specrun.engines.compiler import Compiler
from specrun.engines.exit_choice import choose_exit, compile_exit, parse_early_exit, skipped_layers
from specrun.engines.manifest import (
    CHAT_TEMPLATE_FILE,
    DRAFT,
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    EARLY_EXIT,
    ENGINE_FILE,
    FORMAT_VERSION,
    KERNELS,
    MANIFEST,
    MEDUSA,
    NGRAM,
    NGRAM_FIRST,
    QUANTIZATION_REPORT,
    TARGET,
    TOKENIZER_FILE,
    TREE_SUFFIX,
    VOCABULARY_FILE,
    Bundle,
    BundleError,
    FileEntry,
    HeadEntry,
    Manifest,
    ModelEntry,
    Quality,
    file_entries,
    write_manifest,
)
from specrun.engines.memory import require_room
from specrun.engines.pair import require_pair
from specrun.engines.precision import find_precision
from specrun.engines.quantization import measure_loss, plan_activations
from specrun.engines.schema import SchemaError
from specrun.engines.shared_weights import share_weights
from specrun.engines.source import BuildError, Source
from specrun.engines.staging import staged_directory
from specrun.engines.tensorrt_build import FIRST_WIDTH, require_gpus
from specrun.engines.vocabulary import load_tokenizer
from specrun.export.graph import PRECISIONS as DTYPES
from specrun.export.head_graph import write_head
from specrun.export.heads import Head, HeadCheckpoint, target_shape
from specrun.export.taps import add_taps

logger = logging.getLogger(__name__)

PREFILL_WIDTH = 128
DEFAULT_CAPACITY = 2048
MAX_K = 64
MAX_NODES = 256


@dataclass(frozen=True)
class BuildOptions:
    """What a user asks of a build."""

    model: str  # built-in name, folder, GGUF file, hub id, or a directory that `specrun export` left
    out: Path
    drafts: tuple[str, ...] = ()  # models, heads, or an early exit; the first is in the default proposer
    k: int = 4
    nodes: int = 16  # of a proposed tree
    p_min: float = 0.1  # on a CPU one more row of a verification costs about a twentieth of a plain step
    backend: str = ORT  # a name of engines/backend.py
    precision: str | None = None  # a name of engines/precision.py; None: the backend's first
    text: Path | None = None  # to measure a quantized model with; None: built-in
    accept_quality_loss: bool = False  # build a quantized model however much it lost
    capacity: int | None = None  # DEFAULT_CAPACITY, or all positions of a model that has fewer
    gpus: tuple[str, ...] = ()  # architectures to build for: "sm89"

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_K:
            raise BuildError(f"got k = {self.k}, expected 1 to {MAX_K}")
        if not 1 <= self.nodes <= MAX_NODES:
            raise BuildError(f"got {self.nodes} tree nodes, expected 1 to {MAX_NODES}")
        if not 0 <= self.p_min < 1:
            raise BuildError(f"got p-min {self.p_min}, expected a probability below 1 (0: propose everything)")
        if self.backend not in BACKENDS:
            raise BuildError(f"got backend {self.backend!r}, expected one of {', '.join(BACKENDS)}")
        find_precision(self.backend, self.precision)
        if self.capacity is not None and self.capacity <= self.k + 1:
            raise BuildError(f"got capacity {self.capacity}, expected more than k + 1 = {self.k + 1} tokens")
        if self.backend in GPU_BACKENDS and not self.gpus:
            raise BuildError(
                f"the backend {self.backend} needs --gpu: the GPU that the bundle will run on, such as sm89"
            )
        for gpu in self.gpus:
            require_architecture(gpu)
        if self.backend in TENSORRT_BACKENDS:
            require_gpus(self.backend, self.gpus)

    def compiler(self, cache: Path) -> Compiler:
        return Compiler(
            self.backend, find_precision(self.backend, self.precision), self.engine_widths, self.gpus, cache
        )

    @property
    def export_precision(self) -> str:
        return find_precision(self.backend, self.precision).export

    @property
    def quantized(self) -> bool:
        return find_precision(self.backend, self.precision).quantized

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens per call: plain decoding, verification of a chain, of a tree, prefill chunk."""
        return 1, self.k + 1, self.nodes + 1, PREFILL_WIDTH

    @property
    def engine_widths(self) -> tuple[int, ...]:
        """Those that engines with static shapes have profiles for, ascending. Quantized ones decode at one width only:
        engines of two widths may round differently, which is enough for an activation to fall on the next level."""
        decoding = {max(self.widths[:-1])} if self.quantized else {max(FIRST_WIDTH, width) for width in self.widths}
        return tuple(sorted({*decoding, PREFILL_WIDTH}))

    @property
    def command(self) -> str:
        """That asks for the same again; without the GPUs."""
        parts = ["specrun", "build", self.model, "--out", str(self.out)]
        parts += [part for draft in self.drafts for part in ("--draft", draft)]
        parts += ["--k", str(self.k), "--nodes", str(self.nodes), "--p-min", f"{self.p_min:g}"]
        parts += ["--backend", self.backend]
        for option, value in (("--precision", self.precision), ("--text", self.text), ("--capacity", self.capacity)):
            parts += [option, str(value)] if value else []
        parts += ["--accept-quality-loss"] if self.accept_quality_loss else []
        return shlex.join(parts)


@dataclass(frozen=True)
class Drafts:
    """The drafts of one bundle, opened: at most one of each kind."""

    model: Source | None = None
    heads: tuple[HeadCheckpoint, ...] = ()
    early_exit: tuple[int, ...] | int | None = None  # as parse_early_exit returns it
    proposer: str = NGRAM  # with drafts: lookup, then a tree of the first one

    @classmethod
    def open(cls, options: BuildOptions, downloads: Path) -> "Drafts":
        found: dict[str, Any] = {}
        for option in options.drafts:
            early_exit = parse_early_exit(option)
            head = HeadCheckpoint.recognize(Path(option)) if early_exit is None else None
            kind: str
            draft: Any
            if early_exit is not None:
                kind, draft = EARLY_EXIT, early_exit
            elif head is not None:
                kind, draft = head.kind, head
            else:
                kind, draft = DRAFT_MODEL, Source.open(option, options.export_precision, downloads)
            if kind in found:
                raise BuildError(f"got two drafts of the kind {kind}, the second is {option}; a bundle has one of each")
            found[kind] = draft
        return cls(
            model=found.get(DRAFT_MODEL),
            heads=tuple(found[kind] for kind in (MEDUSA, EAGLE, EAGLE3) if kind in found),
            early_exit=found.get(EARLY_EXIT),
            # No trees with quantized targets; see Runner.proposers.
            proposer=NGRAM_FIRST + next(iter(found)) + ("" if options.quantized else TREE_SUFFIX) if found else NGRAM,
        )

    def fingerprint(self) -> str:
        model = self.model.fingerprint if self.model else ""
        return " ".join([model, *(head.fingerprint() for head in self.heads), str(self.early_exit), self.proposer])


def build_bundle(options: BuildOptions, downloads: Path) -> bool:
    """Build `options.out`, atomically: whatever goes wrong, nothing half-written stays.

    Returns False if the bundle was already there, made from the same inputs, and is intact.
    Raises an error of `engines` or `export` that says what is wrong.
    """
    compiler = options.compiler(downloads.parent / "timing")
    target = Source.open(options.model, options.export_precision, downloads)
    drafts = Drafts.open(options, downloads)
    capacity = options.capacity or min(DEFAULT_CAPACITY, target.context.positions)
    target.context.require(capacity, target.name)
    fingerprint = _fingerprint(options, target, drafts)
    if _is_current(options.out, fingerprint):
        logger.info("%s is up to date", options.out)
        return False
    if drafts.model is not None:
        require_pair(target.vocabulary(), drafts.model.vocabulary(), drafts.model.parameters / target.parameters)
    # Before the long work: whether the heads fit, and the compiler for GPUs is there.
    heads = _load_heads(target, drafts)
    kernels = _compile_kernels(options.gpus)
    with staged_directory(options.out, MANIFEST) as directory:
        sources = [target] if drafts.model is None else [target, drafts.model]
        require_room(
            max(source.parameters for source in sources),
            sum(source.parameters for source in sources) + sum(head.parameters for head, _ in heads.values()),
            directory,
            options.backend,
            options.quantized,
        )
        taps = tuple(sorted({tap for head, _ in heads.values() for tap in head.taps}))
        card, entries, quality = _add_target(target, taps, drafts, directory, options, compiler, capacity)
        for kind, (head, name) in heads.items():
            entries[kind] = _add_head(kind, head, name, directory, compiler, capacity)
        draft_capacity = min(capacity, drafts.model.context.limit) if drafts.model else 0
        draft_card = _add_draft(drafts.model, directory, options, compiler, draft_capacity) if drafts.model else None
        _add_kernels(kernels, directory)
        logger.info("hashing")
        write_manifest(
            directory,
            Manifest(
                format_version=FORMAT_VERSION,
                backend=options.backend,
                precision=compiler.precision.name,
                quality=quality,
                capacity=capacity,
                draft_capacity=draft_capacity,
                k=options.k,
                nodes=options.nodes,
                p_min=options.p_min,
                widths=options.widths,
                engine_widths=options.engine_widths,
                proposer=drafts.proposer,
                gpus=options.gpus,
                target=replace(card.model, signature=replace(card.model.signature, taps=taps)),
                draft=draft_card.model if draft_card else None,
                heads=entries,
                files=file_entries(directory),
                versions=card.versions | _versions(options.backend),
                inputs=fingerprint,
                command=options.command,
            ),
        )
    return True


def _compile_kernels(gpus: tuple[str, ...]) -> dict[str, bytes]:
    if gpus:
        logger.info("compiling the accept step for %s", ", ".join(gpus))
    return {architecture_file(gpu): compile_kernels(gpu) for gpu in gpus}


def _add_kernels(kernels: dict[str, bytes], bundle: Path) -> None:
    if kernels:
        (bundle / KERNELS).mkdir()
    for file, code in kernels.items():
        (bundle / KERNELS / file).write_bytes(code)


def _load_heads(target: Source, drafts: Drafts) -> dict[str, tuple[Head, str]]:
    """The heads by kind, each with its name. Raises BuildError or CheckpointError."""
    if not drafts.heads:
        return {}
    if target.checkpoint is None:
        raise BuildError(
            f"{target.export} is an export, and {drafts.heads[0].name} needs weights of the target; "
            f"build from the target's checkpoint"
        )
    shape = target_shape(target.checkpoint)
    return {head.kind: (head.load(shape), head.name) for head in drafts.heads}


def _versions(backend: str) -> dict[str, str]:
    versions = {"onnxruntime": _onnxruntime_version(), "machine": platform.machine()}
    return versions | ({backend: tensorrt.version(backend)} if backend in TENSORRT_BACKENDS else {})


def _onnxruntime_version() -> str:
    try:
        return version("onnxruntime")
    except PackageNotFoundError:  # a build for NVIDIA GPUs has another name
        return version("onnxruntime-gpu")


def _add_target(
    source: Source,
    taps: tuple[int, ...],
    drafts: Drafts,
    bundle: Path,
    options: BuildOptions,
    compiler: Compiler,
    capacity: int,
) -> tuple[ExportCard, dict[str, HeadEntry], Quality | None]:
    """Put the compiled target into the bundle, with the outputs that heads read and the early exit if it has one."""
    with _exported(source, TARGET, bundle, options) as export:
        card = ExportCard.read(export)
        directory, graph = bundle / TARGET, export / ENGINE_FILE
        if taps:
            graph = export / "tapped.onnx"
            tapped = ir.load(export / ENGINE_FILE)
            add_taps(tapped, replace(card.model.signature, taps=taps))
            ir.save(tapped, graph)  # on the export's weights
            del tapped
        logger.info("%s: compiling for %s, %s", TARGET, options.backend, compiler.precision.name)
        plan = plan_activations(graph, directory, card.model, compiler.precision, options.text)
        quality = measure_loss(graph, directory, card.model, compiler, plan, options.text, options.accept_quality_loss)
        if quality is not None:
            report = render_report(card.model.name, compiler.precision.name, quality, plan)
            (bundle / QUANTIZATION_REPORT).write_text(report, encoding="utf-8")
        compiler.compile(graph, directory / engine_file(options.backend), capacity, plan)
        if taps:
            graph.unlink()
        if drafts.early_exit is None:
            return card, {}, quality
        entry = _add_exit(drafts.early_exit, export, directory, card.model, options.k, compiler, capacity, plan)
        return card, {EARLY_EXIT: entry}, quality


def _add_exit(
    asked: tuple[int, ...] | int,
    export: Path,
    directory: Path,
    model: ModelEntry,
    k: int,
    compiler: Compiler,
    capacity: int,
    plan: Plan | None,
) -> HeadEntry:
    signature = model.signature
    if asked == 0:
        tokenizer = load_tokenizer(directory / TOKENIZER_FILE)
        texts = [tokenizer.encode(text).ids for text in TEXTS]
        measuring = partial(compiler.compile_for_measuring, plan=plan)
        skipped = choose_exit(export / ENGINE_FILE, signature, texts, k, directory, measuring)
    else:
        skipped = skipped_layers(asked, signature.num_layers)
    signature = replace(signature, skipped=skipped)
    backend = compiler.backend
    engine = directory / engine_file(backend, EARLY_EXIT_MODEL)
    compile_exit(export / ENGINE_FILE, engine, signature, partial(compiler.compile, capacity=capacity, plan=plan))
    kept = signature.num_layers - len(skipped)
    if backend in TENSORRT_BACKENDS:
        logger.info("early exit: %d of %d layers, with weights of its own", kept, signature.num_layers)
    else:
        own = share_weights(engine, directory / engine_file(backend))
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


def _add_head(kind: str, head: Head, name: str, bundle: Path, compiler: Compiler, capacity: int) -> HeadEntry:
    logger.info("%s: exporting %s parameters", name, f"{head.parameters:,}")
    directory, export = bundle / kind, bundle / f"{kind}-export"
    directory.mkdir()
    export.mkdir()
    entry = write_head(head, name, export, DTYPES[compiler.precision.export], capacity)
    for file in sorted(export.glob("*.onnx")):
        compiler.compile(file, directory / engine_file(compiler.backend, file.stem), entry.capacity)
    if entry.reduced_vocabulary:
        shutil.copyfile(export / VOCABULARY_FILE, directory / VOCABULARY_FILE)
    shutil.rmtree(export)
    return entry


def _add_draft(source: Source, bundle: Path, options: BuildOptions, compiler: Compiler, capacity: int) -> ExportCard:
    """Put the compiled draft model and its tokenizer into the bundle."""
    with _exported(source, DRAFT, bundle, options) as export:
        card, graph, directory = ExportCard.read(export), export / ENGINE_FILE, bundle / DRAFT
        logger.info("%s: compiling for %s, %s", DRAFT, options.backend, compiler.precision.name)
        plan = plan_activations(graph, directory, card.model, compiler.precision, options.text)
        compiler.compile(graph, directory / engine_file(options.backend), capacity, plan)
        return card


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


def _fingerprint(options: BuildOptions, target: Source, drafts: Drafts) -> str:
    """Of everything that shapes the bundle: weights, options, the code of both stages, library versions."""
    stages = (__file__, specrun.export.__file__, specrun.calibration.__file__)
    folders = [Path(file).parent for file in stages if file is not None]
    code = [file for folder in folders for file in sorted([*folder.glob("*.py"), *folder.glob("*.cu")])]
    parts = [
        target.fingerprint,
        drafts.fingerprint(),
        f"{options.accept_quality_loss} {FileEntry.of(options.text).sha256 if options.text else ''}",
        f"{options.k} {options.nodes} {options.p_min} {options.backend} {options.precision} {options.capacity}",
        f"{options.gpus} {_versions(options.backend)}",
        *(FileEntry.of(file).sha256 for file in code),
        *(f"{package} {version(package)}" for package in ("torch", "transformers", "onnxscript")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_current(out: Path, fingerprint: str) -> bool:
    try:
        return Bundle.open(out).manifest.inputs == fingerprint
    except (BundleError, SchemaError):
        return False
