"""Build a bundle: export what is not exported yet, compile the graphs, write the manifest."""

import hashlib
import logging
import platform
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import specrun.calibration
import specrun.export
from specrun.engines import tensorrt
from specrun.engines.accept_kernels import architecture_file, compile_kernels
from specrun.engines.backend import (
    TENSORRT_BACKENDS,
)
from specrun.engines.build_options import DEFAULT_CAPACITY, BuildOptions
from specrun.engines.bundle_parts import BundleParts
from specrun.engines.exit_choice import parse_early_exit
from specrun.engines.manifest import (
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    EARLY_EXIT,
    FORMAT_VERSION,
    KERNELS,
    MANIFEST,
    MEDUSA,
    NGRAM,
    NGRAM_FIRST,
    QUANTIZATION_REPORT,
    TREE_SUFFIX,
    Bundle,
    BundleError,
    FileEntry,
    Manifest,
    file_entries,
    write_manifest,
)
from specrun.engines.memory import require_room
from specrun.engines.pair import require_pair
from specrun.engines.schema import SchemaError
from specrun.engines.source import BuildError, Source
from specrun.engines.staging import staged_directory
from specrun.export.heads import Head, HeadCheckpoint, target_shape

logger = logging.getLogger(__name__)


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
    compiler = options.compiler(downloads.parent)
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
        parts = BundleParts(directory, options, compiler, capacity)
        card, entries = parts.add_target(target, taps, drafts.early_exit)
        tapped = replace(card.model, signature=replace(card.model.signature, taps=taps))
        for kind, (head, name) in heads.items():
            entries[kind] = parts.add_head(kind, head, name, tapped)
        draft_capacity = min(capacity, drafts.model.context.limit) if drafts.model else 0
        draft_card = parts.add_draft(drafts.model, draft_capacity) if drafts.model else None
        _add_kernels(kernels, directory)
        if (report := parts.quantization.report()) is not None:
            (directory / QUANTIZATION_REPORT).write_text(report, encoding="utf-8")
        logger.info("hashing")
        write_manifest(
            directory,
            Manifest(
                format_version=FORMAT_VERSION,
                backend=options.backend,
                precision=compiler.precision.name,
                quality=parts.quantization.quality,
                acceptance=parts.quantization.acceptance,
                capacity=capacity,
                draft_capacity=draft_capacity,
                k=options.k,
                nodes=options.nodes,
                p_min=options.p_min,
                widths=options.widths,
                engine_widths=options.engine_widths,
                slots=options.slots,
                proposer=drafts.proposer,
                gpus=options.gpus,
                target=tapped,
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
