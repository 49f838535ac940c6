"""The KV cache of one sequence on the device. The invariant is the one of `runner/kv_cache.py`."""

from collections.abc import Sequence

import numpy as np

from specrun.engines.signature import Signature
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.kv_cache import require_capacity

THREADS = 128
WORD_BYTES = 4


class DeviceKVCache:
    """Buffers [1, kv_heads, rows, head_dim] at fixed addresses, each the input and the output of every call."""

    def __init__(self, gpu: Gpu, signature: Signature, dtype: str, capacity: int, rows: int) -> None:
        """`rows`: at least `capacity`; what is more takes the padding of calls at the edge."""
        self.capacity, self.rows = capacity, rows
        self._gpu = gpu
        self._heads = signature.kv_heads
        self._row_bytes = signature.head_dim * np.dtype(dtype).itemsize
        assert self._row_bytes % WORD_BYTES == 0
        size = self._heads * rows * self._row_bytes
        # Zeros, because a masked row still takes part in a product: with zero, but zero times infinity is none.
        self._buffers = {part: gpu.zeros(size) for part in signature.cache_parts()}
        self._addresses = Mirror(gpu.device, gpu.stream, (len(self._buffers),), np.uint64)
        self._addresses.array[:] = [int(buffer.handle) for buffer in self._buffers.values()]
        self._addresses.upload(gpu.stream)
        self._sources = Mirror(gpu.device, gpu.stream, (rows,), np.int32)

    def address(self, layer: int, part: str) -> int:
        return int(self._buffers[layer, part].handle)

    def require(self, tokens: int) -> None:
        """Raises CapacityError if it cannot hold so many."""
        require_capacity(tokens, self.capacity)

    def gather(self, start: int, rows: Sequence[int]) -> None:
        """Move `rows`, ascending and counted from `start`, together to `start`. Raises DeviceError."""
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
                np.int32(start),
                np.int32(self.rows),
                np.int32(self._row_bytes // WORD_BYTES),
            )
