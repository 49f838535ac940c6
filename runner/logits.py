"""Rows of logits, wherever they lie, and what is asked of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specrun.runner.acceptor import accept
from specrun.runner.sampling import Chooser, Guesses
from specrun.runner.types import Proposal, Verdict

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Place:
    """A row of a draft's logits, and what it is for."""

    row: int
    position: int  # in the sequence, of the token that it is to choose
    path: Sequence[int] | None = ()  # the tokens from the committed ones to there; None: not known


class Logits(Protocol):
    """One row for each token of a call, valid until the next call."""

    def __len__(self) -> int:
        """How many rows."""

    def accept(self, proposal: Proposal, chooser: Chooser, position: int) -> Verdict:
        """As `acceptor.accept`, with these rows. Raises LogitsError."""

    def guess(self, places: Sequence[Place], chooser: Chooser, count: int) -> list[Guesses]:
        """For each of `places`, whose rows follow each other, as `Chooser.best`."""

    def row(self, index: int) -> Array:
        """float32 [vocabulary]."""


@dataclass(frozen=True)
class HostLogits:
    """Rows in memory."""

    rows: Array  # float32 [rows, vocabulary], without padding ids
    ids: Array | None = None  # the token of each column, ascending, of a draft with a reduced vocabulary

    def __len__(self) -> int:
        return len(self.rows)

    def accept(self, proposal: Proposal, chooser: Chooser, position: int) -> Verdict:
        return accept(proposal, self.rows, chooser, position)

    def guess(self, places: Sequence[Place], chooser: Chooser, count: int) -> list[Guesses]:
        return [chooser.best(self.rows[at.row], at.position, count, self.ids, at.path) for at in places]

    def row(self, index: int) -> Array:
        return np.asarray(self.rows[index])
