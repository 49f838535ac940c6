"""An engine of TensorRT or TensorRT-RTX: one execution context per shape, one CUDA graph per shape and first slot."""

import logging
from pathlib import Path
from typing import Any

from specrun.engines.backend import TENSORRT_RTX
from specrun.engines.tensorrt import TensorRtError, library, load_engine
from specrun.runner.cuda.engine import Shape, Tensor
from specrun.runner.cuda.gpu import DeviceError, Gpu

logger = logging.getLogger(__name__)


class TensorRtEngine:
    """The contexts take turns on one block of device memory. The first call of a shape and slot runs as it is, the
    second is captured, all further ones launch the graph: its addresses and shapes never change."""

    def __init__(self, backend: str, path: Path, built_with: str, gpu: Gpu) -> None:
        """`built_with`: version of the library that built it. Raises UnfitError or TensorRtError."""
        self._gpu, self._path = gpu, path
        trt = library(backend)
        self._engine = load_engine(backend, path, built_with)
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        profiles = [
            Shape(*self._engine.get_tensor_profile_shape(names[0], profile)[1][:2])
            for profile in range(self._engine.num_optimization_profiles)
        ]
        self.shapes = tuple(sorted(profiles, key=lambda shape: (shape.width, shape.batch)))
        memory = self._engine.device_memory_size_v2
        self._memory = gpu.device.allocate(max(1, memory), stream=gpu.stream)
        self._contexts: dict[Shape, Any] = {}
        for profile, shape in enumerate(profiles):
            context = self._engine.create_execution_context(_configuration(backend, trt, self._engine))
            if context is None:
                raise TensorRtError(
                    f"{path}: no execution context for {shape.batch} times {shape.width} tokens; is the GPU's memory "
                    f"full?"
                )
            context.set_device_memory(int(self._memory.handle), memory)
            context.set_optimization_profile_async(profile, gpu.stream_handle)
            self._contexts[shape] = context
        self._per_slot: dict[str, Tensor] = {}
        self._warm: set[tuple[Shape, int]] = set()
        self._graphs: dict[tuple[Shape, int], Any] = {}

    def bind(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        for name, tensor in outputs.items():
            source = self._engine.get_aliased_input_tensor(name)
            if source is not None and inputs[source].address != tensor.address:
                raise AssertionError(f"{name} must lie where {source} does")
        self._per_slot = {name: tensor for name, tensor in (inputs | outputs).items() if tensor.slot_bytes}
        for shape, context in self._contexts.items():
            for name, tensor in (inputs | outputs).items():
                if name in inputs:
                    context.set_input_shape(name, tensor.shape_of(shape))
                if not context.set_tensor_address(name, tensor.address):
                    raise AssertionError(f"{self._path} has no tensor {name}")

    def run(self, call: Shape, first_slot: int = 0) -> None:
        key = call, first_slot
        if key not in self._graphs and key in self._warm:
            self._graphs[key] = self._gpu.captured(lambda: self._queue(call, first_slot))
        if key in self._graphs:
            self._graphs[key].launch(self._gpu.stream)
        else:
            self._queue(call, first_slot)
            self._warm.add(key)

    def _queue(self, call: Shape, first_slot: int) -> None:
        context = self._contexts[call]
        for name, tensor in self._per_slot.items():
            context.set_tensor_address(name, tensor.address_of(first_slot))
        if not context.execute_async_v3(self._gpu.stream_handle):
            raise DeviceError(f"a call of {call.width} tokens failed on the GPU: {self._path.name} could not be queued")


def _configuration(backend: str, trt: Any, engine: Any) -> Any:
    """How contexts are made: they get their memory from us, and kernels do not change between calls."""
    strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    if backend != TENSORRT_RTX:
        return strategy
    configuration = engine.create_runtime_config()
    configuration.set_execution_context_allocation_strategy(strategy)
    # The default compiles better kernels in the background and switches over: other kernels round otherwise.
    kinds = trt.DynamicShapesKernelSpecializationStrategy
    configuration.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER
    return configuration
