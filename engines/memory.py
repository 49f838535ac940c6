"""How much memory and disk a build needs, and what the machine has."""

import shutil
from pathlib import Path

from specrun.engines.backend import ORT, TENSORRT_BACKENDS
from specrun.engines.errors import UnfitError

GIB = 1 << 30

# Peak resident memory of whole builds, measured: 0.50 GiB for a model of 0.1 million parameters, 1.85 GiB for
# SmolLM2-135M from GGUF (0.50 GiB of fp32 weights), 4.64 GiB for a Llama of 537 million (2.0 GiB). So at most 2.7
# copies of the fp32 weights beyond the libraries. Quantizing the exported SmolLM2-135M to int8 took 1.87 GiB.
# With TensorRT-RTX: 0.83 GiB for a model of 0.1 million parameters, 2.59 GiB for SmolLM2-135M in fp16, 3.05 in int8.
LIBRARIES_BYTES = GIB * 3 // 4
COPIES_OF_FP32_WEIGHTS = 3.0
TENSORRT_LIBRARIES_BYTES = GIB
TENSORRT_COPIES, TENSORRT_COPIES_TO_QUANTIZE = 4.0, 5.0
# The exported graph, the one with joined products, and two optimized ones whose tied head is stored twice, before they
# share their weights.
COPIES_ON_DISK = 4.5
COPIES_TO_QUANTIZE = 4.5  # the optimized ones are smaller then, but calibration observes another graph


def available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say (not Linux)."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_limit()
    return available if limit is None else min(available, limit)


def _cgroup_limit() -> int | None:
    """What a container's memory limit leaves (cgroup v2)."""
    root = Path("/sys/fs/cgroup")
    try:
        maximum = (root / "memory.max").read_text().strip()
        current = int((root / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if maximum == "max" else max(0, int(maximum) - current)


def build_bytes(parameters: int, backend: str = ORT, quantize: bool = False) -> int:
    """Estimated peak memory of exporting and compiling a model of `parameters` parameters."""
    if backend not in TENSORRT_BACKENDS:
        return LIBRARIES_BYTES + int(parameters * 4 * COPIES_OF_FP32_WEIGHTS)
    copies = TENSORRT_COPIES_TO_QUANTIZE if quantize else TENSORRT_COPIES
    return TENSORRT_LIBRARIES_BYTES + int(parameters * 4 * copies)


def require_room(parameters: int, disk_parameters: int, out: Path, backend: str = ORT, quantize: bool = False) -> None:
    """Refuse a build that this machine cannot finish.

    `parameters`: of the largest model built at a time; `disk_parameters`: of all models together; `quantize`: whether
    they are quantized.
    Raises UnfitError.
    """
    needed, available = build_bytes(parameters, backend, quantize), available_bytes()
    if available is not None and needed > available:
        raise UnfitError(
            f"not enough memory: building a model of {parameters:,} parameters takes about "
            f"{needed / GIB:.1f} GiB, {available / GIB:.1f} GiB are available; build on a larger machine"
        )
    needed = int(disk_parameters * 4 * (COPIES_TO_QUANTIZE if quantize else COPIES_ON_DISK))
    free = shutil.disk_usage(out).free
    if needed > free:
        raise UnfitError(
            f"not enough disk space at {out}: the build takes about {needed / GIB:.1f} GiB, "
            f"{free / GIB:.1f} GiB are free; free some or choose another --out"
        )
