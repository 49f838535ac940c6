"""What a device session needs of an engine, whichever library runs it."""

from dataclasses import dataclass
from typing import Protocol

TOKENS = -1  # stands for the width in a shape


@dataclass(frozen=True)
class Tensor:
    """An input or output in device memory, at the same address for calls of every width."""

    address: int
    shape: tuple[int, ...]  # with TOKENS
    dtype: str  # NumPy name

    def shape_of(self, width: int) -> tuple[int, ...]:
        return tuple(width if axis == TOKENS else axis for axis in self.shape)


class DeviceEngine(Protocol):
    """Calls of fixed widths, queued on the stream of a Gpu."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens per call, ascending."""

    def bind(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Say where inputs and outputs lie; once, before the first call."""

    def run(self, width: int) -> None:
        """Queue a call. Raises DeviceError."""
