"""What this processor does with 8-bit numbers."""

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
X86 = ("x86_64", "amd64", "x86", "i686")
# Instructions that add four products of unsigned and signed 8 bits in 32.
VNNI = {"avx512_vnni", "avx_vnni"}


def sums_8_bit_products_exactly(machine: str | None = None, cpuinfo: Path = CPUINFO) -> bool:
    """Whether ONNX Runtime's products of unsigned and signed 8-bit numbers are exact here.

    On x86 without VNNI it adds two products in 16 bits, which hold half of the largest sum; more is cut off (Intel's
    oneDNN guide, "Nuances of int8 computations"). Where nothing tells which instructions an x86 processor has, the
    answer is no. `machine`: as `platform.machine` names it, None: this one.
    """
    if (machine or platform.machine()).lower() not in X86:
        return True
    if not cpuinfo.is_file():
        return False
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not VNNI.isdisjoint(flags)
