"""A small language model of the target's family guesses token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runner.draft_room import DraftRoom
from specrun.runner.draft_tree import CHAIN, TreeShape, grow_tree
from specrun.runner.logits import Logits
from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, feed
from specrun.runner.types import EMPTY, ROOT, Proposal


class DraftModel:
    """Chooses under the target's own sampling and noise, so that a good draft agrees at any temperature."""

    def __init__(self, session: Session, prefill_width: int, shape: TreeShape = CHAIN) -> None:
        self._session = session
        self._prefill_width = prefill_width
        self._shape = shape
        self._fed: list[tuple[int, int]] = []  # token and parent of the nodes that the session holds
        self._room = DraftRoom(session, shape.breadth)

    def start(self, reused: int = 0) -> None:
        self._session.truncate(min(self._session.length, reused))
        self._fed.clear()
        self._room.reset()

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """Nothing to learn from the target's states."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        depth = self._room.depth(limit, len(tokens))
        if not depth:
            return EMPTY
        self._session.keep(self._accepted(tokens))
        self._fed.clear()
        # What the cache lacks: the prompt at first, later what the target chose and we did not feed.
        missing = tokens[self._session.length :]
        for start in range(0, len(missing) - 1, self._prefill_width):
            feed(self._session, missing[start : min(start + self._prefill_width, len(missing) - 1)], wanted=0)
        logits = feed(self._session, missing[-1:]).logits
        return grow_tree(logits, self._feed, chooser, len(tokens), self._shape, depth)

    def _feed(self, tokens: Sequence[int], parents: Sequence[int]) -> Logits:
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
