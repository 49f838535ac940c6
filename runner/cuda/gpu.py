"""The GPU that a bundle runs on."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specrun.engines.errors import SpecrunError, UnfitError, first_line
from specrun.engines.manifest import Bundle
from specrun.runner.cuda.kernels import AcceptKernels


class DeviceError(SpecrunError):
    """A call failed on the device."""


@dataclass(frozen=True)
class Gpu:
    """One device, the stream that everything of a runner is queued on, and the bundle's kernels."""

    device: Any
    stream: Any
    kernels: AcceptKernels

    @classmethod
    def open(cls, bundle: Bundle) -> "Gpu":
        """The first device. Raises UnfitError if there is none, or `bundle` is for others."""
        try:
            from cuda.core import Device

            device = Device(0)
            device.set_current()
        except Exception as error:  # no package, no driver or no device: each has an error class of its own
            raise UnfitError(
                f"{bundle.path} needs an NVIDIA GPU ({', '.join(bundle.manifest.gpus)}), a driver and "
                f"pip install 'specrun[gpu]': {first_line(error)}"
            ) from error
        return cls(device, device.create_stream(), AcceptKernels.of(bundle, device))

    @property
    def stream_handle(self) -> int:
        return int(self.stream.handle)

    def sync(self) -> None:
        """Wait until everything is done. Raises DeviceError."""
        with device_errors("a call"):
            self.stream.sync()

    def zeros(self, size: int) -> Any:
        """A device buffer of `size` bytes."""
        buffer = self.device.allocate(max(1, size), stream=self.stream)
        buffer.fill(0, stream=self.stream)
        return buffer

    def captured(self, launch: Callable[[], None]) -> Any:
        """A CUDA graph of what `launch` queues on the stream."""
        builder = self.stream.create_graph_builder().begin_building()
        try:
            launch()
        except BaseException:
            with contextlib.suppress(Exception):
                builder.end_building()
            raise
        return builder.end_building().complete()


@contextlib.contextmanager
def device_errors(what: str) -> Iterator[None]:
    """Errors of the driver become ours: the request ends with them, the next one can go on."""
    from cuda.core._utils.cuda_utils import CUDAError  # it has no public name

    try:
        yield
    except CUDAError as error:
        raise DeviceError(f"{what} failed on the GPU: {first_line(error)}") from error
