"""The KV cache of one sequence on ONNX Runtime.

The invariant, for target and draft alike: **after a round a cache holds the committed tokens, all but the
last one emitted.** That token is the first input of the next round, because its row is written by the call
that also reads it. Rows beyond the committed length are left over from rejected nodes; the mask hides them, the next
call overwrites them, so to roll back is to set the length. The rows of an accepted path of a tree are moved
together first.

(A draft lacks more: it never reads the last nodes that it proposed. It feeds whatever its cache lacks at the start of
its next proposal.)
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from specrun.engines.errors import SpecrunError
from specrun.engines.signature import Signature

FIRST_ROWS = 256


class CapacityError(SpecrunError):
    """More tokens than the cache can hold."""


def require_capacity(tokens: int, capacity: int) -> None:
    """Raises CapacityError if a cache of `capacity` cannot hold so many."""
    if tokens > capacity:
        raise CapacityError(f"got {tokens} tokens, the KV cache holds {capacity}; build with a larger --capacity")


class KVCache:
    """Buffers that are both input and output of each call, so that ONNX Runtime updates them in place.

    An attention call costs by the rows of its buffers, not by the committed length, so the buffers grow by
    doubling, up to `capacity`, and start small again with each sequence: a long one must not slow down the next.
    Several sessions may use one cache: an early exit shares the target's.
    """

    def __init__(self, signature: Signature, dtype: str, capacity: int, spare_rows: int = 0) -> None:
        """`spare_rows`: beyond the capacity, for rows that are never kept."""
        self.capacity = capacity
        self._most_rows = capacity + spare_rows
        self.version = 0  # counts how often the buffers moved: whoever bound them must bind them again
        self._signature = signature
        self.rows = min(FIRST_ROWS, self._most_rows)
        self._arrays = {part: self._empty(dtype, self.rows) for part in signature.cache_parts()}

    def _empty(self, dtype: str, rows: int) -> np.ndarray[Any, Any]:
        return np.zeros((1, self._signature.kv_heads, rows, self._signature.head_dim), dtype)

    def buffers(self, signature: Signature) -> Iterator[tuple[int, str, ort.OrtValue]]:
        """(layer, "key" | "value", buffer [1, kv_heads, rows, head_dim]) of the layers that `signature` has; each
        buffer shares memory with us."""
        for layer, part in signature.cache_parts():
            yield layer, part, ort.OrtValue.ortvalue_from_numpy(self._arrays[layer, part])

    def require(self, tokens: int) -> None:
        """Raises CapacityError if it cannot hold so many."""
        require_capacity(tokens, self.capacity)

    def reserve(self, start: int, count: int) -> None:
        """Make room for `count` rows in all, of which those before `start` are kept."""
        rows = FIRST_ROWS
        while rows < count:
            rows *= 2
        rows = min(rows, self._most_rows)
        assert rows >= count, "more rows than were required"
        if rows == self.rows or (rows < self.rows and start > 0):
            return
        kept = min(rows, self.rows)
        for part, old in self._arrays.items():
            self._arrays[part] = self._empty(old.dtype.name, rows)
            self._arrays[part][:, :, :kept] = old[:, :, :kept]
        self.rows = rows
        self.version += 1

    def gather(self, start: int, rows: Sequence[int]) -> None:
        """Move `rows`, ascending and counted from `start`, together to `start`."""
        first = next((at for at, row in enumerate(rows) if row != at), len(rows))  # those before are in place
        if first == len(rows):
            return
        source = [start + row for row in rows[first:]]
        for array in self._arrays.values():
            array[:, :, start + first : start + len(rows)] = array[:, :, source]
