"""N-gram lookup where something recurs, another draft elsewhere: the two hit in different places.

As in Arctic Inference's hybrid of suffix decoding and a draft model (Snowflake, 2025).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from specrun.runner.pace import Reach
from specrun.runner.proposers import Proposer
from specrun.runner.proposers.ngram import NGramLookup
from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal


class NGramFirst:
    """A lookup costs nothing, so it is asked first; only a round without a match is the draft's."""

    def __init__(self, draft: Proposer, reach: Callable[[], Reach], lookup: NGramLookup) -> None:
        """`reach`: positions ahead that each of both may guess in the next round."""
        self._lookup = lookup
        self._draft = draft
        self._reach = reach

    def start(self, reused: int = 0) -> None:
        self._lookup.start()
        self._draft.start(reused)

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        self._draft.observe(hidden)

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        reach = self._reach()
        copied = self._lookup.propose(tokens, min(limit, reach.lookup), chooser)
        if copied.tokens or not reach.draft:
            return copied
        return self._draft.propose(tokens, min(limit, reach.draft), chooser)
