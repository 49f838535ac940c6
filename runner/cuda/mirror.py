"""Arrays that host and device both have."""

import ctypes
from typing import Any

import numpy as np


class Mirror:
    """An array on the host, page-locked, and its copy on the device."""

    def __init__(self, device: Any, stream: Any, shape: tuple[int, ...], dtype: Any) -> None:
        from cuda.core import LegacyPinnedMemoryResource

        dtype = np.dtype(dtype)
        size = max(1, int(np.prod(shape))) * dtype.itemsize
        self._host = LegacyPinnedMemoryResource().allocate(size)
        self._device = device.allocate(size, stream=stream)
        memory = np.ctypeslib.as_array((ctypes.c_byte * size).from_address(int(self._host.handle)))
        self.array: np.ndarray[Any, Any] = memory.view(dtype)[: int(np.prod(shape))].reshape(shape)
        self.array[...] = np.zeros((), dtype)

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
