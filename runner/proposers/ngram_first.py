"""N-gram lookup where something recurs, another draft elsewhere: the two hit in different places.

As in Arctic Inference's hybrid of suffix decoding and a draft model (Snowflake, 2025).
"""

from typing import Any

import numpy as np

from specrun.runner.proposers import Proposer
from specrun.runner.proposers.ngram import NGramLookup
from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal


class NGramFirst:
    """A lookup costs nothing, so it is asked first; only a round without a match is the draft's."""

    def __init__(self, draft: Proposer, draft_limit: int) -> None:
        """`draft_limit`: positions that the draft guesses at most; a lookup copies as many as a round allows."""
        self._lookup = NGramLookup()
        self._draft = draft
        self._draft_limit = draft_limit

    def start(self) -> None:
        self._lookup.start()
        self._draft.start()

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        self._draft.observe(hidden)

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        copied = self._lookup.propose(tokens, limit, chooser)
        return copied if copied.tokens else self._draft.propose(tokens, min(limit, self._draft_limit), chooser)
