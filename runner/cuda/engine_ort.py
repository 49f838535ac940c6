"""An engine on ONNX Runtime's CUDA provider."""

from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.errors import first_line
from specrun.engines.ort import load_cuda_engine
from specrun.runner.cuda.engine import Shape, Tensor
from specrun.runner.cuda.gpu import DeviceError, Gpu

DEVICE = "cuda"


class OrtCudaEngine:
    """Takes calls of any shape; those of the bundle are bound once each."""

    def __init__(self, path: Path, shapes: tuple[Shape, ...], gpu: Gpu) -> None:
        self._session = load_cuda_engine(path, gpu.stream_handle)
        self.shapes = shapes
        self._tensors: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        self._bindings: dict[tuple[Shape, int], Any] = {}

    def bind(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        self._tensors = inputs, outputs

    def run(self, call: Shape, first_slot: int = 0) -> None:
        if (call, first_slot) not in self._bindings:
            self._bindings[call, first_slot] = self._binding(call, first_slot)
        try:
            self._session.run_with_iobinding(self._bindings[call, first_slot])
        except Exception as error:  # the bindings raise a class of their own per status code, all plain Exceptions
            raise DeviceError(f"a call of {call.width} tokens failed on the GPU: {first_line(error)}") from error

    def _binding(self, call: Shape, first_slot: int) -> Any:
        binding = self._session.io_binding()
        for tensors, bind in zip(self._tensors, (binding.bind_input, binding.bind_output), strict=True):
            for name, tensor in tensors.items():
                kind, address = np.dtype(tensor.dtype), tensor.address_of(first_slot)
                bind(name, DEVICE, 0, kind, tensor.shape_of(call), address)
        return binding
