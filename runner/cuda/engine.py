"""What calls on the device need of an engine, whichever library runs it."""

from dataclasses import dataclass
from typing import Protocol

TOKENS, SEQUENCES = -1, -2  # stand for the width and the batch in a shape


@dataclass(frozen=True)
class Shape:
    """Of a call."""

    batch: int
    width: int


@dataclass(frozen=True)
class Tensor:
    """An input or output in device memory, at the same address for calls of every shape."""

    address: int
    shape: tuple[int, ...]  # with TOKENS and SEQUENCES
    dtype: str  # NumPy name
    slot_bytes: int = 0  # from one slot's part to the next one's, of a KV cache; otherwise calls begin at the front

    def shape_of(self, call: Shape) -> tuple[int, ...]:
        sizes = {TOKENS: call.width, SEQUENCES: call.batch}
        return tuple(sizes.get(axis, axis) for axis in self.shape)

    def address_of(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes


class DeviceEngine(Protocol):
    """Calls of fixed shapes, queued on the stream of a Gpu."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The narrower ones first, of one width those for fewer sequences."""

    def bind(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Say where inputs and outputs lie; once, before the first call."""

    def run(self, call: Shape, first_slot: int = 0) -> None:
        """Queue a call for slots that follow each other. Raises DeviceError."""


def widest(engine: DeviceEngine) -> int:
    """Tokens of a sequence that a call can read at most."""
    return max(shape.width for shape in engine.shapes)


def fitting(engine: DeviceEngine, batch: int, width: int) -> Shape | None:
    """The smallest shape that has room; None: there is none."""
    return next((shape for shape in engine.shapes if shape.batch >= batch and shape.width >= width), None)
