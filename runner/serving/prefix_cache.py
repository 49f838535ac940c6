"""KV rows of sequences that have ended, for requests that begin with the same tokens: the turns of a chat, a common
system prompt.

Rows are copied out of a slot when its request ends, and into whichever slot the next request gets. A row depends on
the tokens up to it and on nothing else, so a request that is given rows of the tokens it begins with reads what it
would have written itself; no more rows than there are equal tokens are ever given.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrun.runner.slot_session import Rows

Array = np.ndarray[Any, Any]

FEWEST_TOKENS = 16  # shorter sequences are not worth the copy


@dataclass(frozen=True, eq=False)
class Ended:
    """A sequence that has ended. A draft's cache may have fewer rows than there are tokens."""

    tokens: Array  # int64
    rows: dict[str, Rows]  # of each cache that a slot has, by the name of its model
    lags: dict[str, int]  # tokens that a head's rows leave out: row i is of a token that much further on, or less
    size: int = field(init=False)  # bytes

    def __post_init__(self) -> None:
        size = sum(array.nbytes for parts in self.rows.values() for array in parts.values())
        object.__setattr__(self, "size", self.tokens.nbytes + size)

    def shared(self, tokens: Array) -> int:
        """How many tokens both begin with."""
        count = min(len(tokens), len(self.tokens))
        different = np.flatnonzero(self.tokens[:count] != tokens[:count])
        return int(different[0]) if len(different) else count


class PrefixCache:
    """Holds the sequences used last, up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[int, Ended] = OrderedDict()  # by id, the one used last at the end
        self.size = 0  # bytes

    def __len__(self) -> int:
        return len(self._held)

    @property
    def enabled(self) -> bool:
        return self._most_bytes > 0

    def find(self, prompt: Sequence[int]) -> tuple[Ended, int] | None:
        """The sequence that begins most like `prompt`, and how many of its rows hold for it.

        One fewer than there are equal tokens, because an EAGLE head's row belongs to two neighbouring tokens; and the
        last token of the prompt is always read, for its logits.
        """
        wanted = np.array(prompt, np.int64)
        best = max(self._held.values(), key=lambda ended: ended.shared(wanted), default=None)
        if best is None:
            return None
        count = best.shared(wanted) - 1
        if count < FEWEST_TOKENS:
            return None
        self._held.move_to_end(id(best))
        return best, count

    def put(self, tokens: Sequence[int], rows: dict[str, Rows], lags: dict[str, int]) -> None:
        """Keep a sequence; what it continues, and what was not used for longest, gives way."""
        ended = Ended(np.array(tokens, np.int64), rows, lags)
        if len(tokens) < FEWEST_TOKENS or ended.size > self._most_bytes:
            return
        for key, other in list(self._held.items()):
            shared = other.shared(ended.tokens)
            if shared == len(other.tokens):
                self._drop(key)
            elif shared == len(ended.tokens):  # it is held as the beginning of another
                return
        self._held[id(ended)] = ended
        self.size += ended.size
        while self.size > self._most_bytes:
            self._drop(next(iter(self._held)))

    def _drop(self, key: int) -> None:
        self.size -= self._held.pop(key).size
