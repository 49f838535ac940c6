"""A file of JSON lines that says what was decided, when."""

import json
from pathlib import Path
from typing import Any

from specrun.engines.errors import RequestError


class TraceFile:
    """Appends; each line is there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError if `path` cannot be written."""
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise RequestError(f"cannot write the trace {path}: {error.strerror}") from error

    def __call__(self, decision: dict[str, Any]) -> None:
        self._file.write(json.dumps(decision) + "\n")
