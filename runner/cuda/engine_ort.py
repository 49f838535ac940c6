"""An engine on ONNX Runtime's CUDA provider."""

from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.errors import first_line
from specrun.engines.ort import load_cuda_engine
from specrun.runner.cuda.engine import Tensor
from specrun.runner.cuda.gpu import DeviceError, Gpu

DEVICE = "cuda"


class OrtCudaEngine:
    """Takes calls of any width; those of the bundle are bound once each."""

    def __init__(self, path: Path, widths: tuple[int, ...], gpu: Gpu) -> None:
        self._session = load_cuda_engine(path, gpu.stream_handle)
        self.widths = widths
        self._bindings: dict[int, Any] = {}

    def bind(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        for width in self.widths:
            binding = self._bindings[width] = self._session.io_binding()
            for tensors, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
                for name, tensor in tensors.items():
                    bind(name, DEVICE, 0, np.dtype(tensor.dtype), tensor.shape_of(width), tensor.address)

    def run(self, width: int) -> None:
        try:
            self._session.run_with_iobinding(self._bindings[width])
        except Exception as error:  # the bindings raise a class of their own per status code, all plain Exceptions
            raise DeviceError(f"a call of {width} tokens failed on the GPU: {first_line(error)}") from error
