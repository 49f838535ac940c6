"""Where the calls of an engine on a CPU leave their outputs."""

from typing import Any

import numpy as np
import onnxruntime as ort

from specrun.engines.signature import Signature

Array = np.ndarray[Any, Any]


class OutputBuffers:
    """One buffer for each output, as large as the largest call; each call gets the front of it. What holds one is made
    once for each size: a round has so few rows that making it would be noticed."""

    def __init__(self, signature: Signature, dtype: str) -> None:
        """`dtype`: NumPy name of the type of all."""
        self._columns = {name: shape[2] for name, shape in signature.outputs().items()}
        self._dtype = dtype
        self._buffers: dict[str, Array] = {}
        self._views: dict[str, dict[tuple[int, int], tuple[Array, ort.OrtValue]]] = {}

    def bind(self, binding: ort.IOBinding, name: str, batch: int, width: int) -> Array:
        """What the next call leaves there: [batch, width, columns]."""
        views = self._views.setdefault(name, {})
        if (batch, width) not in views:
            views[batch, width] = self._view(name, batch, width)
        array, value = views[batch, width]
        binding.bind_ortvalue_output(name, value)
        return array

    def _view(self, name: str, batch: int, width: int) -> tuple[Array, ort.OrtValue]:
        columns = self._columns[name]
        assert isinstance(columns, int)  # only the first two axes have names
        size = batch * width * columns
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, self._dtype)
            self._views[name].clear()  # they keep the old buffer alive
        array = self._buffers[name][:size].reshape(batch, width, columns)
        return array, ort.OrtValue.ortvalue_from_numpy(array)
