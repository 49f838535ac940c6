"""Whatever guesses, one file per proposer, and what the loop expects of it."""

from typing import Protocol

from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal


class Proposer(Protocol):
    """Guesses what the target will choose. A wrong guess costs time, never correctness."""

    def start(self, prompt: list[int]) -> None:
        """Begin a new sequence."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        """Guess at most `limit` tokens that follow `tokens`, all of them committed.

        `chooser` makes the target's choices: a proposer that has logits chooses with it, under the same noise.
        An empty proposal means plain decoding for this round.
        """

    def truncate(self, length: int) -> None:
        """Forget every token of the sequence from `length` on that a cache may hold."""
