"""The CUDA driver that the kernel tests run on: a GPU's, or a stand-in that computes on the CPU."""

import ctypes
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.accept_kernels import compile_kernels
from specrun.runner.cuda.kernels import AcceptKernels

Array = np.ndarray[Any, Any]
HERE = Path(__file__).parent
# As the kernels are compiled: without fused multiply-add.
COMPILE = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wno-unused-variable"]


def compile_cpp(source: str, target: Path, *options: str) -> Path:
    """Compile one of the C++ files beside this one."""
    command = [*COMPILE, *options, str(HERE / source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@cache
def load_stand_in() -> ctypes.CDLL:
    """The stand-in driver, once a process: whoever asks for the driver by its name afterwards gets this one."""
    with tempfile.TemporaryDirectory() as directory:
        library = compile_cpp(
            "stand_in_driver.cpp",
            Path(directory) / "libcuda.so.1",
            *("-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-ldl"),
        )
        compile_kernels("sm89")  # NVRTC crashes when it is loaded after the stand-in
        return ctypes.CDLL(str(library))


@dataclass(frozen=True)
class Driver:
    """A device with a stream and the kernels."""

    device: Any
    stream: Any
    kernels: AcceptKernels
    stand_in: ctypes.CDLL | None

    @classmethod
    def of_stand_in(cls) -> "Driver":
        stand_in = load_stand_in()
        device = _first_device()
        return cls(device, device.create_stream(), AcceptKernels(compile_kernels("sm89")), stand_in)

    @classmethod
    def of_gpu(cls) -> "Driver":
        device = _first_device()
        return cls(device, device.create_stream(), AcceptKernels(compile_kernels(f"sm{device.arch}")), None)

    def shuffle(self, seed: int) -> None:
        """Let the stand-in run threads in another order; a GPU does as it likes."""
        if self.stand_in is not None:
            self.stand_in.stand_in_seed(ctypes.c_uint64(seed))

    def upload(self, array: Array) -> Any:
        """A device buffer with the array's bytes."""
        from cuda.core import LegacyPinnedMemoryResource

        host = LegacyPinnedMemoryResource().allocate(max(1, array.nbytes))
        contents = np.ascontiguousarray(array)
        ctypes.memmove(int(host.handle), contents.ctypes.data, contents.nbytes)
        buffer = self.device.allocate(max(1, array.nbytes), stream=self.stream)
        buffer.copy_from(host, stream=self.stream)
        self.stream.sync()
        return buffer

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        from cuda.core import LegacyPinnedMemoryResource

        host = LegacyPinnedMemoryResource().allocate(buffer.size)
        buffer.copy_to(host, stream=self.stream)
        self.stream.sync()
        found = np.empty(shape, dtype)
        ctypes.memmove(found.ctypes.data, int(host.handle), found.nbytes)
        return found


def _first_device() -> Any:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    return device
