"""A small language model of the target's family guesses token by token."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runner.draft_tree import CHAIN, TreeShape, grow_tree
from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, feed
from specrun.runner.types import EMPTY, ROOT, Proposal

logger = logging.getLogger(__name__)


class DraftModel:
    """Chooses under the target's own sampling and noise, so that a good draft agrees at any temperature."""

    def __init__(self, session: Session, prefill_width: int, shape: TreeShape = CHAIN) -> None:
        self._session = session
        self._prefill_width = prefill_width
        self._shape = shape
        self._fed: list[tuple[int, int]] = []  # token and parent of the nodes that the session holds
        self._exhausted = False

    def start(self) -> None:
        self._session.truncate(0)
        self._fed.clear()
        self._exhausted = False

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """Nothing to learn from the target's states."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        # The nodes of the last level are never read; those of the others are written after the committed tokens.
        limit = min(limit, (self._session.capacity - len(tokens)) // self._shape.breadth + 1)
        if limit < 1:
            self._report_exhausted(len(tokens))
            return EMPTY
        self._session.keep(self._accepted(tokens))
        self._fed.clear()
        # What the cache lacks: the prompt at first, later what the target chose and we did not feed.
        missing = tokens[self._session.length :]
        for start in range(0, len(missing) - 1, self._prefill_width):
            feed(self._session, missing[start : min(start + self._prefill_width, len(missing) - 1)])
        logits = feed(self._session, missing[-1:]).logits[-1]

        def best(row: np.ndarray[Any, Any], ahead: int, count: int) -> tuple[Any, Any]:
            return chooser.best(row, len(tokens) + ahead, count)

        return grow_tree(logits, self._feed, best, self._shape, limit)

    def _feed(self, tokens: Sequence[int], parents: Sequence[int]) -> np.ndarray[Any, Any]:
        self._fed += zip(tokens, parents, strict=True)
        return self._session.grow(tokens, parents).logits

    def _accepted(self, tokens: list[int]) -> list[int]:
        """The path of nodes that became part of `tokens`, the last token left out: it is fed again for its logits."""
        path: list[int] = []
        for token in tokens[self._session.length : -1]:
            entry = (token, path[-1] if path else ROOT)
            if entry not in self._fed:
                break
            path.append(self._fed.index(entry))
        return path

    def _report_exhausted(self, length: int) -> None:
        if not self._exhausted:
            logger.warning(
                "the draft's context of %d tokens is used up at token %d; decoding goes on without it",
                self._session.capacity,
                length,
            )
        self._exhausted = True
