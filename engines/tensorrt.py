"""TensorRT and TensorRT-RTX. One module for both: they differ in their name and in the GPUs that they know."""

import importlib
import logging
import mmap
from pathlib import Path
from typing import Any

from specrun.engines.backend import TENSORRT, TENSORRT_RTX
from specrun.engines.errors import SpecrunError, UnfitError

logger = logging.getLogger(__name__)

MODULES = {TENSORRT: "tensorrt", TENSORRT_RTX: "tensorrt_rtx"}
# Of TensorRT's warnings: what it says about every graph with 64-bit ids, and what would give wrong results.
HARMLESS, FATAL = "has Int64 binding", "Unused Input"


class TensorRtError(SpecrunError):
    """TensorRT refuses a graph or an engine."""


def library(backend: str) -> Any:
    """The Python module of `backend`. Raises UnfitError."""
    try:
        return importlib.import_module(MODULES[backend])
    except ImportError as error:
        raise UnfitError(
            f"the backend {backend} needs {error.name or MODULES[backend]}, which is not usable here ({error}): "
            f"pip install {backend}"
        ) from error


def known_architectures(backend: str) -> tuple[str, ...] | None:
    """GPU architectures that `backend` builds for wherever it runs; None: only for the GPU of the machine it runs on.
    Raises UnfitError."""
    if backend == TENSORRT:
        return None
    names = library(backend).ComputeCapability.__members__
    return tuple(name.lower() for name in names if name.startswith("SM"))


def version(backend: str) -> str:
    return str(library(backend).__version__)


def make_messages(trt: Any) -> Any:
    """A TensorRT logger that passes messages on to ours and keeps the errors, in `errors`."""

    class Messages(trt.ILogger):  # type: ignore[misc] # imported when it is asked for
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR or FATAL in message:
                self.errors.append(message)
                logger.debug("%s", message)
            elif severity == trt.ILogger.Severity.WARNING and HARMLESS not in message:
                logger.warning("%s: %s", trt.__name__, message)
            else:
                logger.debug("%s", message)

    return Messages()


def load_engine(backend: str, path: Path, built_with: str) -> Any:
    """The engine in `path`, an ICudaEngine. `built_with`: the version that built it. Raises UnfitError or
    TensorRtError."""
    trt = library(backend)
    messages = make_messages(trt)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = trt.Runtime(messages).deserialize_cuda_engine(data)
    if engine is None:
        raise TensorRtError(
            f"{backend} {trt.__version__} refuses {path}, built with {built_with}: {last_error(messages)}; rebuild the "
            f"bundle with the version of this machine"
        )
    return engine


def last_error(messages: Any) -> str:
    return messages.errors[-1] if messages.errors else "it does not say why"
