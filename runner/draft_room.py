"""How far a draft may look ahead before its own context is used up."""

import logging

from specrun.runner.session import Session

logger = logging.getLogger(__name__)


class DraftRoom:
    """The nodes of a proposal's last level are never read; those of the levels above are written to the draft's cache
    behind the committed tokens."""

    def __init__(self, session: Session, breadth: int) -> None:
        self._capacity = session.capacity
        self._deepest = session.max_nodes // breadth + 1
        self._breadth = breadth
        self._reported = False

    def reset(self) -> None:
        """Begin a new sequence."""
        self._reported = False

    def depth(self, limit: int, rows: int) -> int:
        """At most `limit` positions, once the cache holds `rows` committed tokens; 0 if there is no room, which is
        logged once a sequence."""
        depth = min(limit, self._deepest, (self._capacity - rows) // self._breadth + 1)
        if depth < 1 and not self._reported:
            logger.warning(
                "the draft's context of %d tokens is used up at token %d; decoding goes on without it",
                self._capacity,
                rows,
            )
            self._reported = True
        return max(0, depth)
