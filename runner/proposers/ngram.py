"""N-gram lookup: what followed the last few tokens the last time they occurred.

Also called prompt lookup (Saxena, "Prompt Lookup Decoding", 2023). Needs no model; pays where the output
repeats its input or itself: editing, summarizing, code.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runner.sampling import Chooser
from specrun.runner.types import EMPTY, Proposal

LONGEST, SHORTEST = 5, 2
# How many positions a suffix of so many tokens is trusted for; the longest one for as many as a round allows. On
# editing and chat a short suffix is mostly followed by something else soon, a long one by a long copy.
TRUSTED_POSITIONS = {2: 3, 3: 4, 4: 6}


class NGramLookup:
    """Looks for the longest suffix of LONGEST .. SHORTEST tokens that occurred before, its latest occurrence.

    A client's own prediction of the output (as in OpenAI's API) is looked through as if it stood before the prompt, and
    is the first guess.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._prediction = list(prediction)
        self.start()

    def start(self, reused: int = 0) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._indexed = 0
        self._all = list(self._prediction)  # and the tokens of the sequence
        self._prompt_length: int | None = None

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        self._all += tokens[len(self._all) - len(self._prediction) :]
        if self._prompt_length is None:
            self._prompt_length = len(tokens)
        if self._prediction and len(tokens) == self._prompt_length:
            return Proposal.chain(self._prediction[:limit], "prediction")
        # The newest suffixes are left for the next call: they would find themselves.
        self._index(self._all, len(self._all) - 1)
        found = self._find(self._all)
        if found is None:
            return EMPTY
        source, size = found
        predicted = source < len(self._prediction)
        tokens = self._all
        limit = min(limit, TRUSTED_POSITIONS.get(size, limit))
        # An occurrence close to the end runs into what is being guessed: copy on from the copy, so that
        # a repeated pattern is continued to the limit.
        distance = len(tokens) - source
        copied: list[int] = []
        for index in range(limit):
            copied.append(tokens[source + index] if index < distance else copied[index - distance])
        return Proposal.chain(copied, "prediction" if predicted else "lookup")

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """Only the tokens count."""

    def _find(self, tokens: list[int]) -> tuple[int, int] | None:
        """Position after the latest earlier occurrence of the longest suffix that occurred before, and its length."""
        for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            if (end := self._ends.get(tuple(tokens[-size:]))) is not None:
                return end, size
        return None

    def _index(self, tokens: list[int], stop: int) -> None:
        """Remember all n-grams that end at or before position `stop`."""
        for end in range(self._indexed + 1, stop + 1):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, stop)
