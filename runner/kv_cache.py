"""The KV cache of one sequence on ONNX Runtime.

The invariant, for target and draft alike: **after a round a cache holds the committed tokens, all but the
last one emitted.** That token is the first input of the next round, because its row is written by the call
that also reads it. Rows beyond `length` are left over from rejected tokens; the mask hides them, the next call
overwrites them, so to roll back is to set `length`.

(A draft that was accepted whole lacks its own last token as well: it proposed it and never read it. It feeds
whatever its cache lacks at the start of its next proposal, one token or two: see proposers/draft_model.py.)
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort

from specrun.engines.errors import SpecrunError
from specrun.engines.signature import Signature

FIRST_ROWS = 256


class CapacityError(SpecrunError):
    """More tokens than the cache can hold."""


class KVCache:
    """Buffers that are both input and output of each call, so that ONNX Runtime updates them in place.

    An attention call costs by the rows of its buffers, not by the committed length, so the buffers grow by
    doubling, up to `capacity`, and start small again with each sequence: a long one must not slow down the next.
    """

    def __init__(self, signature: Signature, dtype: str, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._signature = signature
        self._rows = min(FIRST_ROWS, capacity)
        self._arrays = [self._empty(dtype, self._rows) for _ in signature.cache_parts()]

    def _empty(self, dtype: str, rows: int) -> np.ndarray[Any, Any]:
        return np.zeros((1, self._signature.kv_heads, rows, self._signature.head_dim), dtype)

    def buffers(self) -> Iterator[tuple[int, str, ort.OrtValue]]:
        """(layer, "key" | "value", buffer [1, kv_heads, rows, head_dim]); the buffer shares memory with us."""
        for (layer, part), array in zip(self._signature.cache_parts(), self._arrays, strict=True):
            yield layer, part, ort.OrtValue.ortvalue_from_numpy(array)

    def reserve(self, tokens: int) -> bool:
        """Make room for `tokens` rows in all. True if the buffers moved. Raises CapacityError."""
        if tokens > self.capacity:
            raise CapacityError(
                f"got {tokens} tokens, the KV cache holds {self.capacity}; build with a larger --capacity"
            )
        rows = FIRST_ROWS
        while rows < tokens:
            rows *= 2
        rows = min(rows, self.capacity)
        if rows == self._rows or (rows < self._rows and self.length > 0):
            return False
        self._rows = rows
        for index, old in enumerate(self._arrays):
            grown = self._empty(old.dtype.name, self._rows)
            grown[:, :, : self.length] = old[:, :, : self.length]
            self._arrays[index] = grown
        return True

    def truncate(self, length: int) -> None:
        """Set the committed length, an absolute one."""
        if not 0 <= length <= self._rows:
            raise AssertionError(f"cannot truncate to {length}: the cache has {self._rows} rows")
        self.length = length
