"""A stand-in for the Python module of TensorRT-RTX, for tests: the part that runs engines, computed by ONNX Runtime on
the memory of the stand-in driver (tests/kernels/stand_in_driver.cpp). It insists on what TensorRT insists on.

`build_engine` writes engines for it in place of the product's.
"""

import ctypes
import enum
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from specrun.engines import ort as ort_backend
from specrun.engines.layers import EngineLayers
from specrun.engines.signature import BATCH, CACHE_LENGTH, CAPACITY, TOKENS, TREE
from specrun.export.axes import pin_axes
from tests.kernels.driver import load_stand_in

__version__ = "1.0-stand-in"

HEADER_BYTES = 4096
MEMORY_BYTES = 1000  # that contexts ask for
TYPES: dict[str, Any] = {
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}

# What the tests look at and decide.
calls: list[tuple[int, bool]] = []  # width of each queued call, and whether it was captured
batches: list[int] = []  # of each queued call
failures: list[int] = []  # calls that fail: how many good ones come before


class ComputeCapability(enum.Enum):
    SM86 = 86
    SM89 = 89


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1


class ILogger:
    class Severity(enum.IntEnum):
        ERROR = 1
        WARNING = 2


class IProgressMonitor:
    pass


class RuntimeConfig:
    def __init__(self) -> None:
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self.strategy = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy


class Runtime:
    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, data: Any) -> "CudaEngine | None":
        try:
            header = json.loads(bytes(data[:HEADER_BYTES]).rstrip(b"\0"))
        except ValueError:
            self._logger.log(ILogger.Severity.ERROR, "the engine plan file is not compatible with this version")
            return None
        return CudaEngine(header["shapes"], bytes(data[HEADER_BYTES:]))


class CudaEngine:
    def __init__(self, shapes: list[tuple[int, int]], model: bytes) -> None:
        self.shapes = shapes  # batch and width
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = {each.name: each for each in self.session.get_inputs()}
        self.outputs = {each.name: each for each in self.session.get_outputs()}
        self.num_optimization_profiles = len(shapes)
        self.num_io_tensors = len(self.inputs) + len(self.outputs)
        self.device_memory_size_v2 = MEMORY_BYTES

    def get_tensor_name(self, index: int) -> str:
        return str([*self.inputs, *self.outputs][index])

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        return [self.shape(name, profile)] * 3

    def shape(self, name: str, profile: int) -> tuple[int, ...]:
        axes = (self.inputs | self.outputs)[name].shape
        sizes = dict(zip((BATCH, TOKENS), self.shapes[profile], strict=True))
        return tuple(sizes[axis] if isinstance(axis, str) else int(axis) for axis in axes)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.replace("present", "past_key_values") if name.startswith("present") else None

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, config: RuntimeConfig) -> "ExecutionContext":
        assert config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        assert config.dynamic_shapes_kernel_specialization_strategy is DynamicShapesKernelSpecializationStrategy.EAGER
        return ExecutionContext(self)


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._profile: int | None = None
        self._memory = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._ran = False
        self._queued: dict[Any, Any] = {}  # by addresses

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= MEMORY_BYTES
        self._memory = address

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        assert self._profile is not None, "no profile"
        assert tuple(shape) == self._engine.shape(name, self._profile), "outside the profile"
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._engine.inputs | self._engine.outputs:
            return False
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        """False for what TensorRT would refuse."""
        engine, driver = self._engine, load_stand_in()
        capturing = bool(driver.stand_in_capturing())
        ready = self._memory and set(self._shapes) == set(engine.inputs)
        ready = ready and set(self._addresses) == set(engine.inputs | engine.outputs)
        # The first call after a change of shapes does work that cannot be captured.
        if not ready or (capturing and not self._ran):
            return False
        if failures:
            failures[0] -= 1
            if failures[0] < 0:
                failures.pop(0)
                return False
        assert self._profile is not None
        batch, width = engine.shapes[self._profile]
        calls.append((width, capturing))
        batches.append(batch)
        self._ran = True
        # A captured call keeps the addresses that it was captured with.
        addresses = tuple(self._addresses.items())
        if addresses not in self._queued:
            self._queued[addresses] = ctypes.CFUNCTYPE(None)(partial(self._compute, dict(addresses)))
        driver.stand_in_enqueue(self._queued[addresses])
        return True

    def _compute(self, addresses: dict[str, int]) -> None:
        assert self._profile is not None
        binding = self._engine.session.io_binding()
        for bind, tensors in (
            (binding.bind_input, self._engine.inputs),
            (binding.bind_output, self._engine.outputs),
        ):
            for name, tensor in tensors.items():
                bind(name, "cpu", 0, TYPES[tensor.type], self._engine.shape(name, self._profile), addresses[name])
        self._engine.session.run_with_iobinding(binding)


def build_engine(
    backend: str,
    graph: Path,
    engine: Path,
    shapes: Sequence[tuple[int, int]],
    rows: int,
    gpus: Sequence[str],
    cache: Path,
) -> None:
    """In place of `specrun.engines.tensorrt_build.build_engine`."""
    model = ir.load(graph)
    if CACHE_LENGTH not in {value.name for value in model.graph.inputs}:
        shapes = sorted({(1, width) for _, width in shapes})
    widths, slots = sorted({width for _, width in shapes}), max(batch for batch, _ in shapes)
    pin_axes(model, {CAPACITY: rows, TREE: max(widths), **({BATCH: 1} if slots == 1 else {})})
    pinned, compiled = graph.with_name("pinned.onnx"), engine.with_name("stand-in.onnx")
    ir.save(model, pinned)
    ort_backend.compile_graph(pinned, compiled)
    pinned.unlink()
    whole = onnx.load(compiled)
    header = json.dumps({"shapes": list(shapes)}).encode()
    engine.write_bytes(header.ljust(HEADER_BYTES, b"\0") + whole.SerializeToString())
    EngineLayers(tuple(widths), slots, rows, ()).write(engine)
    for file in engine.parent.glob(f"{compiled.name}*"):
        file.unlink()
