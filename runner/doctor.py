"""`specrun doctor`: what this machine can build and run."""

import ctypes
import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import onnxruntime as ort

from specrun.engines.accept_kernels import architecture_here
from specrun.engines.memory import GIB, available_bytes
from specrun.engines.ort import usable_cores
from specrun.engines.processor import sums_8_bit_products_exactly

EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "safetensors", "gguf", "accelerate")
# As in pyproject.toml: the first release that the graph contract (opset 24) is tested with.
FIRST_ORT = (1, 32)


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    usable: bool


def examine() -> list[Finding]:
    """What there is, and what can be done with it."""
    memory = available_bytes()
    missing = [name for name in EXPORT_PACKAGES if _version(name) is None]
    rtx, tensorrt = _version("tensorrt-rtx") or _version("tensorrt_rtx"), _version("tensorrt")
    gpu = _has_gpu_driver()
    return [
        Finding("specrun", _version("specrun") or "not installed", True),
        Finding("python", platform.python_version(), True),
        Finding("processor", f"{platform.machine()}, {usable_cores()} of {os.cpu_count()} cores usable", True),
        Finding(
            "products in 8 bits",
            "fast" if sums_8_bit_products_exactly() else "without VNNI, somewhat slower to stay exact",
            True,
        ),
        Finding("memory available", "unknown" if memory is None else f"{memory / GIB:.1f} GiB", True),
        Finding("run on ONNX Runtime (CPU)", f"onnxruntime {ort.__version__}", can_run()),
        Finding("export and build", _missing(missing) if missing else f"torch {_version('torch')}", not missing),
        Finding("output after a grammar", _found("llguidance", "grammar"), _version("llguidance") is not None),
        Finding("kernels for GPUs", _found("nvidia-cuda-nvrtc", "gpu"), _version("nvidia-cuda-nvrtc") is not None),
        Finding("engines for GPUs", _found("polygraphy", "gpu"), _version("polygraphy") is not None),
        Finding("TensorRT-RTX", rtx or "not installed", rtx is not None),
        Finding("TensorRT", tensorrt or "not installed", tensorrt is not None),
        Finding("NVIDIA driver", "found" if gpu else "not found", gpu),
        Finding("GPU", architecture_here() or "not found", gpu),
    ]


def can_run() -> bool:
    """Whether bundles run here at all."""
    return tuple(int(part) for part in ort.__version__.split(".")[:2]) >= FIRST_ORT


def _missing(names: list[str]) -> str:
    return f"lacks {', '.join(names)}; pip install 'specrun[export]'"


def _found(package: str, extra: str) -> str:
    return f"{package} {found}" if (found := _version(package)) else f"lacks {package}; pip install 'specrun[{extra}]'"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _has_gpu_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1" if platform.system() == "Linux" else "nvcuda.dll")
    except OSError:
        return False
    return True
