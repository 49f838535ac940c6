"""A session without an engine: logits are a function of the tokens so far, computed at once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrun.runner.kv_cache import CapacityError

Array = np.ndarray[Any, Any]
LogitsOf = Callable[[tuple[int, ...]], Array]


class TableSession:
    """Keeps the committed tokens as its "cache", so that a wrong truncation shows in the logits."""

    def __init__(self, logits_of: LogitsOf, capacity: int = 10_000) -> None:
        self._logits_of = logits_of
        self._tokens: list[int] = []
        self._committed = 0
        self.capacity = capacity
        self.widths: list[int] = []

    @property
    def length(self) -> int:
        return self._committed

    def forward(self, tokens: Sequence[int]) -> Array:
        if self._committed + len(tokens) > self.capacity:
            raise CapacityError("full")
        self._tokens[self._committed :] = tokens
        start, self._committed = self._committed, len(self._tokens)
        self.widths.append(len(tokens))
        return np.stack([self._logits_of(tuple(self._tokens[: at + 1])) for at in range(start, self._committed)])

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self._tokens)
        self._committed = length


def context_logits(vocabulary: int, seed: int, spread: float = 1.5) -> LogitsOf:
    """Logits that depend on the last three tokens and their position."""

    def logits_of(tokens: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([seed, len(tokens), *tokens[-3:]])
        return rng.normal(0, spread, vocabulary).astype(np.float32)

    return logits_of
