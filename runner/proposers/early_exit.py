"""The target drafts for itself, with some of its layers left out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runner.draft_room import DraftRoom
from specrun.runner.draft_tree import CHAIN, TreeShape, grow_tree
from specrun.runner.logits import Logits
from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, feed
from specrun.runner.types import EMPTY, Proposal


class EarlyExit:
    """Works on the target's own KV cache: what it writes lies beyond the committed tokens, and the verification
    overwrites it."""

    def __init__(self, session: Session, shape: TreeShape = CHAIN) -> None:
        self._session = session
        self._shape = shape
        self._room = DraftRoom(session, shape.breadth)

    def start(self, reused: int = 0) -> None:
        self._room.reset()

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """The target's cache is its memory."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        depth = self._room.depth(limit, len(tokens))
        if not depth:
            return EMPTY
        self._session.truncate(len(tokens) - 1)
        logits = feed(self._session, tokens[-1:]).logits
        return grow_tree(logits, self._feed, chooser, len(tokens), self._shape, depth)

    def _feed(self, tokens: Sequence[int], parents: Sequence[int]) -> Logits:
        return self._session.grow(tokens, parents).logits
