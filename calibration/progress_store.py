"""What a calibration has found out so far, on disk: an interrupted one goes on there, a finished one is not repeated.

One directory per graph, text and version of this code.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrun.calibration.plan import ActivationPlan, Plan

Array = np.ndarray[Any, Any]

PLAN = "plan.npz"
HASH_CHUNK_BYTES = 1 << 22


class ProgressStore:
    """Files of one calibration."""

    def __init__(self, root: Path, graph: Path, windows: Sequence[Sequence[int]]) -> None:
        state = hashlib.sha256(json.dumps([list(window) for window in windows]).encode())
        code = sorted(Path(__file__).parent.glob("*.py"))
        for file in (*code, *sorted(graph.parent.glob(f"{graph.name}*")), *_weights(graph)):
            with file.open("rb") as opened:
                while chunk := opened.read(HASH_CHUNK_BYTES):
                    state.update(chunk)
        self._directory = root / state.hexdigest()[:32]

    def window(self, index: int) -> dict[str, tuple[Array, Array]] | None:
        """Maxima and rows by activation, of a window that was read before."""
        arrays = self._read(f"window-{index}.npz")
        if arrays is None:
            return None
        return {name: (arrays[f"{at}.maxima"], arrays[f"{at}.rows"]) for at, name in enumerate(_names(arrays))}

    def keep_window(self, index: int, read: dict[str, tuple[Array, Array]]) -> None:
        arrays = {}
        for at, (maxima, rows) in enumerate(read.values()):
            arrays[f"{at}.maxima"], arrays[f"{at}.rows"] = maxima, rows
        self._write(f"window-{index}.npz", list(read), arrays)

    def plan(self) -> Plan | None:
        """The finished plan."""
        arrays = self._read(PLAN)
        if arrays is None:
            return None
        fields = json.loads(str(arrays["fields"]))
        return {
            name: ActivationPlan(factors=arrays[f"{at}.factors"], layers=tuple(each.pop("layers")), **each)
            for at, (name, each) in enumerate(zip(_names(arrays), fields, strict=True))
        }

    def keep_plan(self, plan: Plan) -> None:
        """Windows are needed no longer."""
        fields = [{**dataclasses.asdict(each), "factors": None} for each in plan.values()]
        for each in fields:
            del each["factors"]
        arrays = {f"{at}.factors": each.factors for at, each in enumerate(plan.values())}
        shutil.rmtree(self._directory, ignore_errors=True)
        self._write(PLAN, list(plan), {**arrays, "fields": np.array(json.dumps(fields))})

    def _read(self, name: str) -> dict[str, Array] | None:
        file = self._directory / name
        if not file.is_file():
            return None
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)

    def _write(self, name: str, names: list[str], arrays: dict[str, Array]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        partial = self._directory / f"{name}.{os.getpid()}.partial"
        with partial.open("wb") as file:
            np.savez(file, names=np.array(names), **arrays)  # type: ignore[arg-type] # its signature wants a bool
        partial.replace(self._directory / name)


def _names(arrays: dict[str, Array]) -> list[str]:
    return [str(name) for name in arrays["names"]]


def _weights(graph: Path) -> list[Path]:
    """The weights of a graph that lies beside the export that it was made from."""
    return sorted(set(graph.parent.glob("*.data")) - set(graph.parent.glob(f"{graph.name}*")))
