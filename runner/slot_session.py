"""A session of one sequence among several: an engine reads tokens of many slots in one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specrun.runner.kv_cache import require_capacity
from specrun.runner.session import Output
from specrun.runner.tree import Ancestry

Array = np.ndarray[Any, Any]

# Rows of a KV cache, [kv_heads, rows, head_dim], by (layer, "key" | "value").
Rows = dict[tuple[int, str], Array]


@dataclass(frozen=True)
class SlotCall:
    """What one slot wants read."""

    slot: int
    tokens: Sequence[int]
    depths: Array  # of each token below the committed ones
    mask: Array  # as `Ancestry.add` gives it
    length: int  # committed tokens
    before: int  # nodes that are there already
    features: Array | None
    wanted: int  # of so many of the last tokens logits are read

    @property
    def written(self) -> int:
        return self.length + self.before


class SlotCache(Protocol):
    """The KV caches of one model for all slots."""

    capacity: int
    written: list[int]  # rows of each slot that hold something

    def gather(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Move `rows` of a slot, ascending and counted from `start`, together to `start`."""

    def read(self, slot: int, count: int) -> Rows:
        """A copy of a slot's first rows."""

    def write(self, slot: int, rows: Rows, count: int) -> None:
        """Give a slot that has none its first rows."""


class SlotEngine(Protocol):
    """Calls for several slots at once."""

    max_tokens: int  # of one call
    max_nodes: int  # that may lie below the committed tokens when a call adds more

    def together(self, calls: Sequence[SlotCall]) -> int:
        """How many of the first `calls` one engine call can serve; at least 1."""

    def call(self, calls: Sequence[SlotCall]) -> list[Output]:
        """What each gets, valid until the next call."""


# Gets an engine, a call and its tokens, and returns what the call gave.
Wait = Callable[[Any, Any, int], Any]


def at_once(engine: Any, call: Any, tokens: int) -> Any:
    """For a session that shares its engine with nobody."""
    return engine.call([call])[0]


class SlotSession:
    """One slot; as `Session`."""

    def __init__(self, wait: Wait, engine: SlotEngine, cache: SlotCache, slot: int) -> None:
        self._wait, self._engine, self._cache, self._slot = wait, engine, cache, slot
        self._length = 0
        self._nodes = Ancestry()

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_tokens(self) -> int:
        return self._engine.max_tokens

    @property
    def max_nodes(self) -> int:
        return self._engine.max_nodes

    def grow(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        features: Array | None = None,
        wanted: int | None = None,
    ) -> Output:
        """As `Session.grow`. Raises CapacityError, or an error of the engine."""
        before = len(self._nodes)
        require_capacity(self._length + before + len(tokens), self._cache.capacity)
        depths, mask = self._nodes.add(parents)
        wanted = len(tokens) if wanted is None else wanted
        call = SlotCall(self._slot, tokens, depths, mask, self._length, before, features, wanted)
        output: Output = self._wait(self._engine, call, len(tokens))
        return output

    def keep(self, nodes: Sequence[int]) -> None:
        self._cache.gather(self._slot, self._length, nodes)
        self._length += len(nodes)
        self._nodes.clear()

    def truncate(self, length: int) -> None:
        # Not "<= self._length": an early exit takes over rows that the target wrote.
        if not 0 <= length <= self._cache.capacity:
            raise AssertionError(f"cannot truncate to {length}: the cache has room for {self._cache.capacity}")
        self._length = length
        self._nodes.clear()

    def release(self) -> None:
        """Nothing of this slot is needed any more."""
        self.truncate(0)
        self._cache.written[self._slot] = 0

    def rows(self) -> Rows:
        """A copy of the committed tokens' rows."""
        return self._cache.read(self._slot, self._length)

    def take_rows(self, rows: Rows, count: int) -> None:
        """Begin with the first `count` of `rows`, or all if they are fewer; without any other."""
        count = max(0, min(count, *(array.shape[1] for array in rows.values())))
        self._cache.write(self._slot, rows, count)
        self.truncate(count)
