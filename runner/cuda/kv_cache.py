"""The KV caches of some sequences on the device. The invariant is the one of `runner/kv_cache.py`."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from specrun.engines.signature import Signature
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.mirror import Mirror, Pinned
from specrun.runner.slot_session import Rows

THREADS = 128
WORD_BYTES = 4


class DeviceKVCache:
    """Buffers [slots, kv_heads, rows, head_dim] at fixed addresses, each the input and the output of every call."""

    def __init__(self, gpu: Gpu, signature: Signature, dtype: str, capacity: int, rows: int, slots: int = 1) -> None:
        """`rows`: at least `capacity`; what is more takes the padding of calls at the edge."""
        self.capacity, self.rows, self.slots = capacity, rows, slots
        self.written = [0] * slots
        self._gpu = gpu
        self._heads, self._dtype, self._columns = signature.kv_heads, np.dtype(dtype), signature.head_dim
        self._row_bytes = signature.head_dim * self._dtype.itemsize
        assert self._row_bytes % WORD_BYTES == 0
        self.slot_bytes = self._heads * rows * self._row_bytes
        size = slots * self.slot_bytes
        # Zeros, because a masked row still takes part in a product: with zero, but zero times infinity is none.
        self._buffers = {part: gpu.zeros(size) for part in signature.cache_parts()}
        self._addresses = Mirror(gpu.device, gpu.stream, (len(self._buffers),), np.uint64)
        self._addresses.array[:] = [int(buffer.handle) for buffer in self._buffers.values()]
        self._addresses.upload(gpu.stream)
        self._sources = Mirror(gpu.device, gpu.stream, (rows,), np.int32)

    def address(self, layer: int, part: str) -> int:
        return int(self._buffers[layer, part].handle)

    def gather(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Move `rows` of a slot, ascending and counted from `start`, together to `start`. Raises DeviceError."""
        if list(rows) == list(range(len(rows))):
            return
        self._gpu.sync()  # the device has read what stood in `sources`
        self._sources.array[: len(rows)] = rows
        with device_errors("moving rows of the KV cache"):
            self._sources.upload(self._gpu.stream)
            self._gpu.kernels.launch(
                self._gpu.stream,
                "gather_rows",
                (len(self._buffers), self._heads),
                THREADS,
                self._addresses.pointer,
                self._sources.pointer,
                np.int32(len(rows)),
                np.int32(slot * self._heads * self.rows + start),
                np.int32(self.rows),
                np.int32(self._row_bytes // WORD_BYTES),
            )

    def read(self, slot: int, count: int) -> Rows:
        """A copy of a slot's first rows. Waits for the device. Raises DeviceError."""
        found: Rows = {}
        for key, buffer in self._buffers.items():
            with device_errors("reading the KV cache"):
                for head in range(self._heads):
                    host, device = self._parts(buffer, slot, head, count)
                    device.copy_to(host, stream=self._gpu.stream)
            self._gpu.sync()
            found[key] = self._staged(count).copy()
        return found

    def write(self, slot: int, rows: Rows, count: int) -> None:
        """Give a slot that has none its first rows. Waits for the device. Raises DeviceError."""
        for key, buffer in self._buffers.items():
            self._staged(count)[:] = rows[key][:, :count]
            with device_errors("writing the KV cache"):
                for head in range(self._heads):
                    host, device = self._parts(buffer, slot, head, count)
                    device.copy_from(host, stream=self._gpu.stream)
            self._gpu.sync()
        self.written[slot] = max(self.written[slot], count)

    def _parts(self, buffer: Any, slot: int, head: int, count: int) -> tuple[Any, Any]:
        """The first rows of one head: in the staging area, and on the device."""
        from cuda.core import Buffer

        size = count * self._row_bytes
        staging = self._staging.host
        first = slot * self.slot_bytes + head * self.rows * self._row_bytes
        return (
            Buffer.from_handle(int(staging.handle) + head * size, size, owner=staging),
            Buffer.from_handle(int(buffer.handle) + first, size, owner=buffer),
        )

    def _staged(self, count: int) -> np.ndarray[Any, Any]:
        """What lies in the staging area: [kv_heads, count, head_dim]."""
        shape = self._heads, count, self._columns
        return self._staging.array.reshape(-1)[: int(np.prod(shape))].reshape(shape)

    @cached_property
    def _staging(self) -> Pinned:
        """Page-locked, for one part of a slot."""
        return Pinned((self._heads, self.rows, self._columns), self._dtype)
