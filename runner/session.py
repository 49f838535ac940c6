"""What the loop and the proposers need of a model, whatever runs it."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Session(Protocol):
    """One model with the KV cache of one sequence."""

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold."""

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""

    def forward(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Feed a chain of tokens after the committed ones and commit them.

        Returns float32 logits [len(tokens), vocabulary], without padding ids, valid until the next call.
        Raises CapacityError.
        """

    def truncate(self, length: int) -> None:
        """Set the committed length: forget every token from there on."""


def prefill(session: Session, tokens: Sequence[int], width: int) -> None:
    """Feed `tokens` in calls of at most `width`."""
    for start in range(0, len(tokens), width):
        session.forward(tokens[start : start + width])
