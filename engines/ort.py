"""ONNX Runtime as an engine: optimize a graph once at build, load it as it is at every start."""

import logging
import os
from functools import cache
from pathlib import Path

import onnxruntime as ort

from specrun.engines.errors import SpecrunError, first_line

logger = logging.getLogger(__name__)

NAME = "ort"
PROVIDERS = ["CPUExecutionProvider"]
EXTERNAL_FILE_KEY = "session.optimized_model_external_initializers_file_name"
EXTERNAL_SIZE_KEY = "session.optimized_model_external_initializers_min_size_in_bytes"
WARNING = 2


class EngineError(SpecrunError):
    """ONNX Runtime refuses a graph."""


def compile_graph(graph: Path, engine: Path) -> None:
    """Optimize the exported `graph` and write the result to `engine` with its weights beside it.

    Extended optimizations only: they are the same on every CPU, so a bundle can be built on one machine
    and run on another. Raises EngineError.
    """
    options = _options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(engine)
    options.add_session_config_entry(EXTERNAL_FILE_KEY, engine.name + ".data")
    options.add_session_config_entry(EXTERNAL_SIZE_KEY, "1024")
    _session(graph, options)


def load_engine(engine: Path) -> ort.InferenceSession:
    """Load a compiled engine without optimizing it again. Raises EngineError.

    All engines of a process share one pool of threads, one per core that it may use. A pool for each would keep
    spinning after its own calls and take the cores from the next engine's: with a target and a draft in turn, calls
    took twice as long.
    """
    _create_shared_threads()
    options = _options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.use_per_session_threads = False
    return _session(engine, options)


@cache
def _create_shared_threads() -> None:
    try:
        ort.set_global_thread_pool_sizes(usable_cores(), 1)
    except Exception as error:  # a bare class of the bindings; whoever embeds us may have made the pool already
        logger.info("using ONNX Runtime's threads as they are: %s", first_line(error))


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = WARNING
    return options


def _session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    try:
        return ort.InferenceSession(str(path), options, providers=PROVIDERS)
    except Exception as error:  # the bindings raise a class of their own per status code, all plain Exceptions
        raise EngineError(f"ONNX Runtime {ort.__version__} refuses {path}: {first_line(error)}") from error
