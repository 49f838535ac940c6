"""A session without an engine: logits are a function of the tokens so far, computed at once."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrun.runner.kv_cache import CapacityError
from specrun.runner.logits import HostLogits
from specrun.runner.session import Output
from specrun.runner.types import ROOT

Array = np.ndarray[Any, Any]
LogitsOf = Callable[[tuple[int, ...]], Array]


class TableSession:
    """Keeps the committed tokens as its "cache", so that a wrong commit shows in the logits."""

    def __init__(self, logits_of: LogitsOf, capacity: int = 10_000) -> None:
        self._logits_of = logits_of
        self._tokens: list[int] = []
        self._lines: list[tuple[int, ...]] = []  # of each node: the tokens from the committed ones to it
        self.capacity = capacity
        self.widths: list[int] = []

    @property
    def length(self) -> int:
        return len(self._tokens)

    @property
    def max_tokens(self) -> int:
        return sys.maxsize

    @property
    def max_nodes(self) -> int:
        return sys.maxsize

    def grow(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        features: Array | None = None,
        wanted: int | None = None,
    ) -> Output:
        if len(self._tokens) + len(self._lines) + len(tokens) > self.capacity:
            raise CapacityError("full")
        first = len(self._lines)
        for token, parent in zip(tokens, parents, strict=True):
            self._lines.append((*(() if parent == ROOT else self._lines[parent]), token))
        self.widths.append(len(tokens))
        read = self._lines[len(self._lines) - wanted :] if wanted is not None else self._lines[first:]
        logits = [self._logits_of((*self._tokens, *line)) for line in read]
        return Output(HostLogits(np.array(logits, np.float32)), hidden=None)

    def keep(self, nodes: Sequence[int]) -> None:
        for depth, node in enumerate(nodes, start=1):
            assert len(self._lines[node]) == depth, "not a path"
            assert depth == 1 or self._lines[node][:-1] == self._lines[nodes[depth - 2]], "not a path"
        if len(nodes):
            self._tokens += self._lines[nodes[-1]]
        self._lines.clear()

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self._tokens)
        del self._tokens[length:]
        self._lines.clear()


def context_logits(vocabulary: int, seed: int, spread: float = 1.5) -> LogitsOf:
    """Logits that depend on the last three tokens and their position."""

    def logits_of(tokens: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([seed, len(tokens), *tokens[-3:]])
        return rng.normal(0, spread, vocabulary).astype(np.float32)

    return logits_of
