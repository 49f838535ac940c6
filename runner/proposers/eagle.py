"""An EAGLE head guesses from the target's own hidden states (EAGLE-1, 2 and 3; see export/eagle.py)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrun.runner.draft_room import DraftRoom
from specrun.runner.draft_tree import CHAIN, TreeShape, grow_tree
from specrun.runner.logits import Logits
from specrun.runner.sampling import Chooser
from specrun.runner.session import Output, Session, feed
from specrun.runner.types import EMPTY, ROOT, Proposal

Array = np.ndarray[Any, Any]


class Eagle:
    """Row t of the head's cache is token t + 1 beside the target's states at t, which led to it (behind a
    gap, a later token). While drafting, the
    head's own states stand in; they are replaced by the target's after each round."""

    def __init__(
        self,
        session: Session,
        fuse: Callable[[Array], Array],
        prefill_width: int,
        shape: TreeShape = CHAIN,
    ) -> None:
        """`fuse`: features [tokens, hidden] out of the target's states [tokens, taps * hidden]."""
        self._session = session
        self._fuse = fuse
        self._prefill_width = prefill_width
        self._shape = shape
        self._room = DraftRoom(session, shape.breadth)
        self._unread: list[Array] = []  # the target's states at tokens that the head has not read
        self._states: list[Array] = []  # of the nodes fed since, the committed tokens' last one in front

    def start(self, reused: int = 0) -> None:
        # Where the head has read less than the target, the states in between are gone: it goes on behind the gap,
        # without it. Its guesses know less then.
        self._session.truncate(min(self._session.length, reused))
        self._unread.clear()
        self._room.reset()

    def observe(self, hidden: Array | None) -> None:
        assert hidden is not None, "the target has no taps"
        self._unread.append(hidden.copy())  # fused when the head is asked: it may not be for a while

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        if not self._unread:  # a prompt of one token
            return EMPTY
        depth = self._room.depth(limit, len(tokens) - 1)
        if not depth:
            return EMPTY
        output = self._catch_up(tokens)
        assert output.hidden is not None
        self._states = [output.hidden[-1].copy()]
        proposal = grow_tree(output.logits, self._feed, chooser, len(tokens), self._shape, depth)
        self._session.truncate(self._session.length)
        return proposal

    def _catch_up(self, tokens: list[int]) -> Output:
        """Read the tokens that the target has read, each beside the states that led to it."""
        features = self._fuse(np.concatenate(self._unread))
        self._unread.clear()
        missing = tokens[len(tokens) - len(features) :]
        for start in range(0, len(missing), self._prefill_width):
            part = slice(start, start + self._prefill_width)
            output = feed(self._session, missing[part], features[part])
        return output

    def _feed(self, tokens: Sequence[int], parents: Sequence[int]) -> Logits:
        features = np.stack([self._states[parent - ROOT] for parent in parents])
        output = self._session.grow(tokens, parents, features)
        assert output.hidden is not None
        self._states += list(output.hidden.copy())
        return output.logits
