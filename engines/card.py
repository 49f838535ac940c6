"""The card of an exported graph: what `specrun export` leaves beside model.onnx and a build reads."""

import json
from dataclasses import dataclass
from pathlib import Path

from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import ModelEntry
from specrun.engines.schema import from_json, to_json

CARD_FILE = "export.json"


class CardError(SpecrunError):
    """A directory is not an export, or not one that can be built from."""


@dataclass(frozen=True)
class ExportCard:
    precision: str  # "fp32" | "fp16"
    pinned: dict[str, int]  # axes that were made static; empty for a graph that engines are built from
    model: ModelEntry
    versions: dict[str, str]

    def write(self, directory: Path) -> None:
        (directory / CARD_FILE).write_text(json.dumps(to_json(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> "ExportCard":
        """The card in `directory`. Raises CardError or SchemaError."""
        file = directory / CARD_FILE
        try:
            data = json.loads(file.read_bytes())
        except FileNotFoundError:
            raise CardError(f"{directory} has no {CARD_FILE}; expected what `specrun export` leaves") from None
        except ValueError as error:
            raise CardError(f"{file} is not JSON ({error}); export the model again") from error
        return from_json(cls, data, str(file))
