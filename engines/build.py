"""Build a bundle: export what is not exported yet, compile the graphs, write the manifest."""

import hashlib
import logging
import platform
import shutil
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import specrun.export
from specrun.engines import ort
from specrun.engines.card import CARD_FILE, ExportCard
from specrun.engines.context import Context
from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import (
    CHAT_TEMPLATE_FILE,
    DRAFT,
    DRAFT_MODEL,
    ENGINE_FILE,
    FORMAT_VERSION,
    MANIFEST,
    NGRAM,
    TARGET,
    TOKENIZER_FILE,
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
from specrun.engines.staging import staged_directory
from specrun.engines.vocabulary import Vocabulary, load_tokenizer
from specrun.export.checkpoint import Checkpoint
from specrun.export.family import context_of
from specrun.export.graph import PRECISIONS, write_export
from specrun.export.tokenizer import write_tokenizer

logger = logging.getLogger(__name__)

PREFILL_WIDTH = 128
DEFAULT_CAPACITY = 2048
MAX_K = 64


class BuildError(SpecrunError):
    """A build request makes no sense."""


@dataclass(frozen=True)
class BuildOptions:
    """What a user asks of a build."""

    model: str  # built-in name, folder, GGUF file, hub id, or a directory that `specrun export` left
    out: Path
    draft: str | None = None
    k: int = 4
    precision: str = "fp32"
    capacity: int | None = None  # DEFAULT_CAPACITY, or all positions of a model that has fewer

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_K:
            raise BuildError(f"got k = {self.k}, expected 1 to {MAX_K}")
        if self.precision not in PRECISIONS:
            raise BuildError(f"got precision {self.precision!r}, expected one of {', '.join(PRECISIONS)}")
        if self.capacity is not None and self.capacity <= self.k + 1:
            raise BuildError(f"got capacity {self.capacity}, expected more than k + 1 = {self.k + 1} tokens")


@dataclass(frozen=True)
class Source:
    """A model on its way into a bundle: a checkpoint to be exported, or an export."""

    checkpoint: Checkpoint | None
    export: Path | None
    parameters: int
    name: str
    context: Context
    fingerprint: str

    @classmethod
    def open(cls, source: str, precision: str, downloads: Path) -> "Source":
        directory = Path(source)
        if (directory / CARD_FILE).is_file():
            return cls._of_export(directory, precision)
        checkpoint = Checkpoint.open(source, downloads)
        return cls(
            checkpoint=checkpoint,
            export=None,
            parameters=checkpoint.parameters,
            name=checkpoint.name,
            context=context_of(checkpoint.config),
            fingerprint=checkpoint.fingerprint(),
        )

    @classmethod
    def _of_export(cls, directory: Path, precision: str) -> "Source":
        card = ExportCard.read(directory)
        if card.pinned:
            raise BuildError(f"{directory} was exported with static axes {card.pinned}; export it without --width")
        if card.precision != precision:
            raise BuildError(f"{directory} was exported as {card.precision}, the build asks for {precision}")
        entries = "\n".join(f"{name} {entry.sha256}" for name, entry in file_entries(directory).items())
        fingerprint = hashlib.sha256(entries.encode()).hexdigest()
        return cls(
            checkpoint=None,
            export=directory,
            parameters=card.model.parameters,
            name=card.model.name,
            context=card.model.context,
            fingerprint=fingerprint,
        )

    def vocabulary(self) -> Vocabulary:
        """The vocabulary, before anything is exported."""
        if self.export is not None:
            return Vocabulary.of(load_tokenizer(self.export / TOKENIZER_FILE))
        assert self.checkpoint is not None
        with tempfile.TemporaryDirectory() as scratch:
            return Vocabulary.of(write_tokenizer(self.checkpoint, Path(scratch))[0])

    def exported(self, scratch: Path, precision: str) -> Path:
        """The directory of the export, made in `scratch` if need be."""
        if self.export is not None:
            return self.export
        assert self.checkpoint is not None
        scratch.mkdir()
        write_export(self.checkpoint, scratch, precision, {})
        return scratch


def build_bundle(options: BuildOptions, downloads: Path) -> bool:
    """Build `options.out`, atomically: whatever goes wrong, nothing half-written stays.

    Returns False if the bundle was already there, made from the same inputs, and is intact.
    Raises an error of `engines` or `export` that says what is wrong.
    """
    target = Source.open(options.model, options.precision, downloads)
    draft = Source.open(options.draft, options.precision, downloads) if options.draft else None
    capacity = options.capacity or min(DEFAULT_CAPACITY, target.context.positions)
    target.context.require(capacity, target.name)
    fingerprint = _fingerprint(options, target, draft)
    if _is_current(options.out, fingerprint):
        logger.info("%s is up to date", options.out)
        return False
    if draft is not None:
        require_pair(target.vocabulary(), draft.vocabulary(), draft.parameters / target.parameters)
    with staged_directory(options.out, MANIFEST) as directory:
        sources = [target] if draft is None else [target, draft]
        require_room(
            max(source.parameters for source in sources),
            sum(source.parameters for source in sources),
            directory,
        )
        card = _add_model(target, TARGET, directory, options)
        draft_card = _add_model(draft, DRAFT, directory, options) if draft else None
        logger.info("hashing")
        write_manifest(
            directory,
            Manifest(
                format_version=FORMAT_VERSION,
                backend=ort.NAME,
                precision=options.precision,
                capacity=capacity,
                draft_capacity=min(capacity, draft.context.limit) if draft else 0,
                k=options.k,
                widths=(1, options.k + 1, PREFILL_WIDTH),
                draft_method=DRAFT_MODEL if draft else NGRAM,
                target=card.model,
                draft=draft_card.model if draft_card else None,
                files=file_entries(directory),
                versions=card.versions | {"onnxruntime": version("onnxruntime"), "machine": platform.machine()},
                inputs=fingerprint,
            ),
        )
    return True


def _add_model(source: Source, name: str, bundle: Path, options: BuildOptions) -> ExportCard:
    """Put one compiled model and its tokenizer into `bundle`/`name`."""
    scratch = bundle / f"{name}-export"
    export = source.exported(scratch, options.precision)
    directory = bundle / name
    directory.mkdir()
    logger.info("%s: optimizing for ONNX Runtime", name)
    ort.compile_graph(export / ENGINE_FILE, directory / ENGINE_FILE)
    for file in (TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
        if (export / file).is_file():
            shutil.copyfile(export / file, directory / file)
    card = ExportCard.read(export)
    shutil.rmtree(scratch, ignore_errors=True)
    return card


def _fingerprint(options: BuildOptions, target: Source, draft: Source | None) -> str:
    """Of everything that shapes the bundle: weights, options, the code of both stages, library versions."""
    code = [
        file
        for stage in (Path(__file__).parent, Path(specrun.export.__file__).parent)
        for file in sorted(stage.glob("*.py"))
    ]
    parts = [
        target.fingerprint,
        draft.fingerprint if draft else "",
        f"{options.k} {options.precision} {options.capacity}",
        *(FileEntry.of(file).sha256 for file in code),
        *(f"{package} {version(package)}" for package in ("torch", "transformers", "onnxscript", "onnxruntime")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_current(out: Path, fingerprint: str) -> bool:
    try:
        return Bundle.open(out).manifest.inputs == fingerprint
    except (BundleError, SchemaError):
        return False
