"""Rows of logits, wherever they lie, and what is asked of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from specrun.runner.acceptor import accept
from specrun.runner.sampling import Chooser, Guesses
from specrun.runner.types import Proposal, Verdict

Array = np.ndarray[Any, Any]

# Gets what was done, for how many rows, and the seconds it took.
Timed = Callable[[str, int, float], None]
ACCEPT, GUESS, FUSE = "accept", "guess", "fuse"


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
    timed: Timed | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def accept(self, proposal: Proposal, chooser: Chooser, position: int) -> Verdict:
        start = time.perf_counter()
        verdict = accept(proposal, self.rows, chooser, position)
        if self.timed is not None:
            self.timed(ACCEPT, 1 + len(verdict.path), time.perf_counter() - start)
        return verdict

    def guess(self, places: Sequence[Place], chooser: Chooser, count: int) -> list[Guesses]:
        start = time.perf_counter()
        guesses = [chooser.best(self.rows[at.row], at.position, count, self.ids, at.path) for at in places]
        if self.timed is not None:
            self.timed(GUESS, len(places), time.perf_counter() - start)
        return guesses

    def row(self, index: int) -> Array:
        return np.asarray(self.rows[index])
