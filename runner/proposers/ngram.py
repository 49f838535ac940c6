"""N-gram lookup: what followed the last few tokens the last time they occurred.

Also called prompt lookup (Saxena, "Prompt Lookup Decoding", 2023). Needs no model; pays where the output
repeats its input or itself: editing, summarizing, code.
"""

from typing import Any

import numpy as np

from specrun.runner.sampling import Chooser
from specrun.runner.types import EMPTY, Proposal

LONGEST, SHORTEST = 5, 2


class NGramLookup:
    """Looks for the longest suffix of LONGEST .. SHORTEST tokens that occurred before, its latest occurrence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._indexed = 0

    def start(self) -> None:
        self._ends.clear()
        self._indexed = 0

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        # The newest suffixes are left for the next call: they would find themselves.
        self._index(tokens, len(tokens) - 1)
        source = self._find(tokens)
        if source is None:
            return EMPTY
        # An occurrence close to the end runs into what is being guessed: copy on from the copy, so that
        # a repeated pattern is continued to the limit.
        distance = len(tokens) - source
        copied: list[int] = []
        for index in range(limit):
            copied.append(tokens[source + index] if index < distance else copied[index - distance])
        return Proposal.chain(copied)

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """Only the tokens count."""

    def _find(self, tokens: list[int]) -> int | None:
        """Position after the latest earlier occurrence of the longest suffix that occurred before."""
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            if (end := self._ends.get(tuple(tokens[-size:]))) is not None:
                return end
        return None

    def _index(self, tokens: list[int], stop: int) -> None:
        """Remember all n-grams that end at or before position `stop`."""
        for end in range(self._indexed + 1, stop + 1):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, stop)
