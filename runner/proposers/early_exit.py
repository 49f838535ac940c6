"""The target drafts for itself, with some of its layers left out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runner.draft_tree import CHAIN, TreeShape, grow_tree
from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, feed
from specrun.runner.types import EMPTY, Proposal


class EarlyExit:
    """Works on the target's own KV cache: what it writes lies beyond the committed tokens, and the verification
    overwrites it."""

    def __init__(self, session: Session, shape: TreeShape = CHAIN) -> None:
        self._session = session
        self._shape = shape

    def start(self) -> None:
        """Nothing of its own to forget."""

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """The target's cache is its memory."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        limit = min(limit, (self._session.capacity - len(tokens)) // self._shape.breadth + 1)
        if limit < 1:
            return EMPTY
        self._session.truncate(len(tokens) - 1)
        logits = feed(self._session, tokens[-1:]).logits[-1]

        def best(row: np.ndarray[Any, Any], ahead: int, count: int) -> tuple[Any, Any]:
            return chooser.best(row, len(tokens) + ahead, count)

        return grow_tree(logits, self._feed, best, self._shape, limit)

    def _feed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray[Any, Any]:
        return self._session.grow(tokens, parents).logits
