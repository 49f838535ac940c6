"""Arrays that host and device both have."""

import ctypes
from typing import Any

import numpy as np


class Pinned:
    """An array on the host, page-locked, all zeros."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        from cuda.core import LegacyPinnedMemoryResource

        dtype = np.dtype(dtype)
        count = int(np.prod(shape))
        size = max(1, count) * dtype.itemsize
        self.host = LegacyPinnedMemoryResource().allocate(size)
        memory = np.ctypeslib.as_array((ctypes.c_byte * size).from_address(int(self.host.handle)))
        self.array: np.ndarray[Any, Any] = memory.view(dtype)[:count].reshape(shape)
        self.array[...] = np.zeros((), dtype)


class Mirror:
    """An array on the host, page-locked, and its copy on the device."""

    def __init__(self, device: Any, stream: Any, shape: tuple[int, ...], dtype: Any) -> None:
        pinned = Pinned(shape, dtype)
        self._host, self.array = pinned.host, pinned.array
        self._device = device.allocate(self._host.size, stream=stream)

    @property
    def pointer(self) -> np.uint64:
        return np.uint64(int(self._device.handle))

    def upload(self, stream: Any) -> None:
        self._device.copy_from(self._host, stream=stream)

    def copy_from(self, source: Any, stream: Any) -> None:
        """Copy a device buffer into the copy on the device."""
        self._device.copy_from(source, stream=stream)

    def download(self, stream: Any) -> None:
        self._device.copy_to(self._host, stream=stream)
