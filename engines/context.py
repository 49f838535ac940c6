"""How much context a model can use exactly."""

from dataclasses import dataclass

from specrun.engines.errors import SpecrunError


class ContextError(SpecrunError):
    """A KV cache capacity that a model cannot use exactly."""


@dataclass(frozen=True)
class Context:
    """The graph attends to everything, so it equals the model only while nothing falls out of a window."""

    positions: int  # tokens that the model was trained for
    window: int | None  # the shortest attention window of any layer

    @property
    def limit(self) -> int:
        """The largest capacity that is exact."""
        return self.positions if self.window is None else min(self.positions, self.window)

    def require(self, capacity: int, model: str) -> None:
        """Refuse a capacity beyond the limit. Raises ContextError."""
        if self.window is not None and self.window < capacity:
            raise ContextError(
                f"{model} cannot be exact: its sliding window of {self.window} tokens is shorter than the capacity of "
                f"{capacity}; use a capacity of {self.limit} or less"
            )
        if self.positions < capacity:
            raise ContextError(
                f"{model} was trained for {self.positions} positions, the capacity is {capacity}; "
                f"use a capacity of {self.limit} or less"
            )
