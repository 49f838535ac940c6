"""Text to measure a model with: tokens in windows."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from specrun.calibration.texts import TEXTS
from specrun.engines.errors import SpecrunError

CALIBRATION_SHARE, CALIBRATION_WINDOWS = 10, 12
HELD_OUT_TOKENS = 20_000


class CorpusError(SpecrunError):
    """There is too little text, or none that can be read."""


@dataclass(frozen=True)
class Corpus:
    """Windows of token ids, always the same ones."""

    calibration: list[list[int]]
    held_out: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, file: Path | None, longest: int) -> "Corpus":
        """Windows of `longest` tokens, of `file` or of built-in text: every tenth one calibrates, the others
        are held out. Built in are a few texts of our own and Python's help topics, prose with code. Raises
        CorpusError."""
        text = _read(file) if file is not None else _built_in()
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows = [ids[start : start + longest] for start in range(0, len(ids), longest)]
        windows = [window for window in windows if len(window) > 1]
        if len(windows) < 2:
            raise CorpusError(
                f"{file or 'the built-in text'} has {len(ids)} tokens, expected more than {longest}: some to calibrate "
                f"with, some to measure with"
            )
        held_out = [window for index, window in enumerate(windows) if index % CALIBRATION_SHARE]
        return cls(windows[::CALIBRATION_SHARE][:CALIBRATION_WINDOWS], held_out[: HELD_OUT_TOKENS // longest])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{file} cannot be read as UTF-8 text: {error}") from error


def _built_in() -> str:
    if importlib.util.find_spec("pydoc_data") is None:
        raise CorpusError("this Python comes without its help texts (pydoc_data); give a file of text with --text")
    from pydoc_data.topics import topics

    return "\n\n".join([*TEXTS, *(topics[name] for name in sorted(topics))])
