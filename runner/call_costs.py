"""What calls of an engine cost on this machine, learned while they are made."""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

WIDE = 20  # tokens a sequence; wider calls read text, they are no rounds
WIDEST_TIMED = 64  # wider ones would tell little about rounds
ADAPT_ALL = 0.05  # of a surprise, by which all sizes move together: longer caches, a busier machine
ADAPT_ONE = 0.1  # of a surprise, by which the size itself moves
TRUSTED = 20  # calls of a size; more make it no more certain
REDRAW_EVERY = 8  # calls, once all that it would change is small
MOST_SURPRISE = 3.0  # a call that took longer by more than this was disturbed


class CallCosts:
    """Seconds of an engine's calls by rows, batch times width: a curve through the sizes that were seen."""

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}
        self._reading: dict[str, float] = {}

    def call(self, engine: str, batch: int, width: int, seconds: float) -> None:
        """A call was made."""
        if width > WIDE:
            self._reading[engine] = self.reading(engine) + seconds
        if width <= WIDEST_TIMED:
            self.observe(engine, batch * width, seconds)

    def reading(self, engine: str) -> float:
        """Seconds of all wide calls so far."""
        return self._reading.get(engine, 0.0)

    def observe(self, engine: str, rows: int, seconds: float) -> None:
        self._curves.setdefault(engine, _Curve()).observe(rows, seconds)

    def predict(self, engine: str, rows: float) -> float | None:
        """None before anything was measured."""
        found = self.predict_all(engine, np.array([rows], float))
        return None if found is None else float(found[0])

    def predict_all(self, engine: str, rows: Array) -> Array | None:
        """As `predict`, for an array."""
        curve = self._curves.get(engine)
        return None if curve is None or curve.empty else curve.predict(rows)


class _Curve:
    """Sizes are grouped: half a power of two each. Between the means of two groups the curve is straight."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by group, to be multiplied by `_scale`
        self._rows: dict[int, float] = {}  # by group, their mean: not all calls have the size in its middle
        self._counts: dict[int, int] = {}
        self._scale = 1.0
        self._points: tuple[Array, Array] | None = None
        self._undrawn = 0  # calls since

    @property
    def empty(self) -> bool:
        return not self._seconds

    def observe(self, rows: int, seconds: float) -> None:
        group = round(2 * math.log2(rows))
        self._counts[group] = count = self._counts.get(group, 0) + 1
        if count == 1:  # memory was allocated for it: it says nothing about the next ones
            return
        if count == 2:
            self._seconds[group], self._rows[group] = seconds / self._scale, rows
        else:
            pull = max(ADAPT_ONE, 1 / count)
            self._rows[group] += pull * (rows - self._rows[group])
            ratio = seconds / (self._seconds[group] * self._scale)
            ratio = min(MOST_SURPRISE, max(1 / MOST_SURPRISE, ratio))
            self._scale *= ratio**ADAPT_ALL
            self._seconds[group] *= ratio**pull
        self._undrawn += 1
        if count <= TRUSTED or self._undrawn >= REDRAW_EVERY:
            self._points, self._undrawn = None, 0

    def predict(self, rows: Array) -> Array:
        if self._points is None:
            groups = sorted(self._seconds)
            weights = [min(self._counts[group], TRUSTED) for group in groups]
            heights = _rising([self._seconds[group] for group in groups], weights)
            self._points = np.array([self._rows[group] for group in groups]), heights
        at, heights = self._points
        found = np.interp(rows, at, heights)
        if len(at) > 1:
            slope = (heights[-1] - heights[-2]) / (at[-1] - at[-2])
            found = np.where(rows > at[-1], heights[-1] + slope * (rows - at[-1]), found)
        return np.asarray(found * self._scale)


def _rising(heights: list[float], weights: list[int]) -> Array:
    """The nearest heights that never fall: more rows never cost less, what looks like it is noise. Sizes that were seen
    often count for more than one that was seen twice (pool adjacent violators)."""
    pools: list[tuple[float, int, int]] = []  # height, weight, how many
    for height, weight in zip(heights, weights, strict=True):
        pool = height, weight, 1
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            pool = (before[0] * before[1] + pool[0] * pool[1]) / both, both, before[2] + pool[2]
        pools.append(pool)
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
