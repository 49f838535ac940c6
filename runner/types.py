"""The words of a round, as data."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Origin = Literal["plain", "drafted", "correction", "bonus"]
FinishReason = Literal["stop", "length"]
Source = Literal["lookup", "prediction", "draft"]  # of a proposal

ROOT = -1  # stands for the last committed token where a parent is asked for


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens, the nodes of a tree below the last committed token. A chain is a tree without branches.

    `parents[i]`: the node that node i follows, an earlier one, or ROOT. Nodes with the same parent hold different
    tokens.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    # What each token was drawn from, float32 [vocabulary or less], where the rejection rule will judge; None:
    # deterministic.
    draft_probs: tuple[np.ndarray[Any, Any], ...] | None = None
    source: Source = "draft"

    @classmethod
    def chain(cls, tokens: "tuple[int, ...] | list[int]", source: Source = "draft") -> "Proposal":
        """Each token is the guess for the position after the one before."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), None, source)

    def first(self, count: int) -> "Proposal":
        """Its first nodes, at most `count`."""
        probs = None if self.draft_probs is None else self.draft_probs[:count]
        return Proposal(self.tokens[:count], self.parents[:count], probs, self.source)

    def depths(self) -> list[int]:
        """How many positions each node is away from the last committed token: 1 for its children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def children(self, node: int) -> dict[int, int]:
        """The nodes that follow `node`, by their token."""
        return {self.tokens[index]: index for index, parent in enumerate(self.parents) if parent == node}


@dataclass(frozen=True)
class Verdict:
    """What the target makes of a proposal: the path of nodes that it accepts, and its own next token."""

    path: tuple[int, ...]
    next_token: int


@dataclass(frozen=True)
class Token:
    """A token of the output. `finish_reason` is set on the last one."""

    id: int
    origin: Origin
    finish_reason: FinishReason | None


EMPTY = Proposal((), ())
