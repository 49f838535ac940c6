"""What the loop and the proposers need of a model, whatever runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specrun.runner.logits import Logits

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Output:
    """What a call gives, valid until the next call."""

    logits: Logits  # of each token, or of the last ones, as many as were wanted
    hidden: Array | None  # float32 [tokens, taps * hidden], of models that have taps


class Session(Protocol):
    """One model with the KV cache of one sequence: committed tokens, and below the last of them a tree of nodes."""

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold."""

    @property
    def length(self) -> int:
        """Committed tokens in the cache."""

    @property
    def max_tokens(self) -> int:
        """Of one call."""

    @property
    def max_nodes(self) -> int:
        """That may lie below the committed tokens when a call adds more."""

    def grow(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        features: Array | None = None,
        wanted: int | None = None,
    ) -> Output:
        """Feed nodes without committing them.

        `parents`: as in `Proposal`; nodes are counted from the last commit on, over several calls. `features`
        [tokens, hidden]: for models that read them. `wanted`: of so many of the last tokens logits are read; None: of
        all. Raises CapacityError.
        """

    def keep(self, nodes: Sequence[int]) -> None:
        """Commit a path of nodes, from the committed tokens downwards, and forget the others."""

    def truncate(self, length: int) -> None:
        """Set the committed length: forget every token from there on, and all nodes."""


def feed(session: Session, tokens: Sequence[int], features: Array | None = None, wanted: int | None = 1) -> Output:
    """Feed a chain of tokens after the committed ones and commit it. The rest as in `Session.grow`."""
    output = session.grow(tokens, range(-1, len(tokens) - 1), features, wanted)
    session.keep(range(len(tokens)))
    return output
