"""The kernels of `engines/accept.cu`, which a bundle brings compiled."""

from typing import Any

import numpy as np

from specrun.engines.accept_kernels import architecture_file
from specrun.engines.manifest import KERNELS, Bundle

NO_POINTER = np.uint64(0)


class AcceptKernels:
    """The compiled kernels, loaded for one device."""

    def __init__(self, image: bytes) -> None:
        from cuda.core import ObjectCode

        self._module = ObjectCode.from_cubin(image)
        self._kernels: dict[str, Any] = {}

    @classmethod
    def of(cls, bundle: Bundle, device: Any) -> "AcceptKernels":
        """Those of `bundle` for `device`. Raises UnfitError if it was not built for this one."""
        architecture = f"sm{device.arch}"
        bundle.require_gpu(architecture)
        return cls((bundle.path / KERNELS / architecture_file(architecture)).read_bytes())

    def launch(
        self, stream: Any, name: str, grid: tuple[int, int], threads: int, *arguments: "np.uint64 | np.int32"
    ) -> None:
        from cuda.core import LaunchConfig, launch

        if name not in self._kernels:
            self._kernels[name] = self._module.get_kernel(name)
        launch(stream, LaunchConfig(grid=(*grid, 1), block=(threads, 1, 1)), self._kernels[name], *arguments)
