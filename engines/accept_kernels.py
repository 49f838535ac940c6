"""Compile the accept step (`accept.cu`) for GPUs. Needs neither a GPU nor a CUDA toolkit: NVRTC is on PyPI."""

from pathlib import Path
from typing import Any

from specrun.engines.errors import SpecrunError, UnfitError

SOURCE = Path(__file__).with_name("accept.cu")
# Turing to Blackwell, discrete cards and modules.
ARCHITECTURES = (
    *("sm75", "sm80", "sm86", "sm87", "sm88", "sm89"),
    *("sm90", "sm100", "sm103", "sm110", "sm120", "sm121"),
)


class ArchitectureError(SpecrunError):
    """The kernels cannot be compiled for this GPU architecture."""


def architecture_file(architecture: str) -> str:
    """Name of the compiled kernels for an architecture such as sm89."""
    return f"accept.{architecture}.cubin"


def require_architecture(architecture: str) -> None:
    """Raises ArchitectureError."""
    if architecture not in ARCHITECTURES:
        raise ArchitectureError(f"got GPU {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")


def compile_kernels(architecture: str) -> bytes:
    """Machine code for one architecture. Raises ArchitectureError, or UnfitError without the compiler."""
    try:
        from cuda.core import Program
    except ImportError as error:
        raise UnfitError(
            f"kernels for a GPU need {error.name}, which is not installed: pip install 'specrun[gpu]'"
        ) from error
    program = Program(SOURCE.read_text(encoding="utf-8"), "c++", compiler_options(architecture))
    return bytes(program.compile("cubin").code)


def compiler_options(architecture: str) -> Any:
    """cuda.core's ProgramOptions. Raises ArchitectureError."""
    require_architecture(architecture)
    from cuda.core import ProgramOptions

    # Fused multiply-add would round otherwise than the NumPy reference.
    return ProgramOptions(arch=architecture.replace("sm", "sm_"), std="c++17", fma=False)


def architecture_here() -> str | None:
    """Of this machine's first GPU, such as sm89; None without a GPU or what it takes to look."""
    try:
        from cuda.core import Device

        return f"sm{Device(0).arch}"
    except Exception:  # no package, no driver or no device: each has an error class of its own
        return None
