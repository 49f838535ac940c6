"""ONNX Runtime as an engine: optimize a graph once at build, load it as it is at every start."""

import os
from pathlib import Path

import onnxruntime as ort

from specrun.engines.backend import ORT, ORT_CUDA
from specrun.engines.errors import SpecrunError, first_line
from specrun.engines.processor import sums_8_bit_products_exactly

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
EXTERNAL_FILE_KEY = "session.optimized_model_external_initializers_file_name"
EXTERNAL_SIZE_KEY = "session.optimized_model_external_initializers_min_size_in_bytes"
STOP_SPINNING_KEY = "session.force_spinning_stop"
UNSIGNED_WEIGHTS_KEY = "session.x64quantprecision"
PRODUCT_IN_8_BITS = b"MatMulIntegerToFloat"
WARNING = 2


class EngineError(SpecrunError):
    """ONNX Runtime refuses a graph."""


def compile_graph(graph: Path, engine: Path, backend: str = ORT) -> None:
    """Optimize the exported `graph` and write the result to `engine` with its weights beside it.

    For a CPU extended optimizations only: they are the same on every CPU, so a bundle can be built on one machine
    and run on another. For a GPU only what is the same for all providers; the rest happens when the engine is loaded,
    because it needs the GPU. Raises EngineError.
    """
    options = _options()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_BASIC if backend == ORT_CUDA else level.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(engine)
    options.add_session_config_entry(EXTERNAL_FILE_KEY, engine.name + ".data")
    options.add_session_config_entry(EXTERNAL_SIZE_KEY, "1024")
    _session(graph, options, CPU)


def load_engine(engine: Path) -> ort.InferenceSession:
    """Load a compiled engine without optimizing it again; it uses one thread per core that this process may use.

    Its threads stop spinning when a call returns. Otherwise those of a target and those of its draft, which run in
    turn, take the cores from each other: calls took twice as long. (A pool for the whole process would be faster by
    another 5 %, but forbids sessions of its own to whoever embeds the runner.)

    Products in 8 bits are exact on every processor. Where sums of signed weights would overflow, ONNX Runtime rewrites
    them as unsigned ones, which are slower in wide calls. It would do so on processors that need it not, too, and only
    together with its other optimizations, of which nothing is left to do but a third of a second of looking. Raises
    EngineError.
    """
    options = _options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not sums_8_bit_products_exactly() and engine.is_file() and PRODUCT_IN_8_BITS in engine.read_bytes():
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry(UNSIGNED_WEIGHTS_KEY, "1")
    options.intra_op_num_threads = usable_cores()
    options.add_session_config_entry(STOP_SPINNING_KEY, "1")
    return _session(engine, options, CPU)


def load_cuda_engine(engine: Path, stream: int) -> ort.InferenceSession:
    """Load an engine on the CUDA provider; calls are queued on `stream`, a handle. What that provider cannot run goes
    to the CPU, which ONNX Runtime warns of. Raises EngineError."""
    if CUDA not in ort.get_available_providers():
        raise EngineError(
            f"this ONNX Runtime {ort.__version__} has no {CUDA}; pip uninstall onnxruntime, then pip install "
            f"onnxruntime-gpu"
        )
    settings = {"user_compute_stream": str(stream), "do_copy_in_default_stream": "1"}
    return _session(engine, _options(), (CUDA, settings), CPU)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = WARNING
    return options


def _session(
    path: Path, options: ort.SessionOptions, *providers: str | tuple[str, dict[str, str]]
) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except Exception as error:  # the bindings raise a class of their own per status code, all plain Exceptions
        raise EngineError(f"ONNX Runtime {ort.__version__} refuses {path}: {first_line(error)}") from error
