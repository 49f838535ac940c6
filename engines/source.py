"""A model on its way into a bundle."""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from specrun.engines.card import CARD_FILE, ExportCard
from specrun.engines.context import Context
from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import TOKENIZER_FILE, file_entries
from specrun.engines.vocabulary import Vocabulary, load_tokenizer
from specrun.export.checkpoint import Checkpoint
from specrun.export.family import context_of
from specrun.export.graph import write_export
from specrun.export.tokenizer import write_tokenizer


class BuildError(SpecrunError):
    """A build request makes no sense."""


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
