"""Whatever guesses, one file per proposer, and what the loop expects of it."""

from typing import Any, Protocol

import numpy as np

from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal


class Proposer(Protocol):
    """Guesses what the target will choose. A wrong guess costs time, never correctness."""

    def start(self, reused: int = 0) -> None:
        """Begin a new sequence. `reused`: tokens of it that the caches hold already; a draft's may hold fewer."""

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        """The target has read and committed more tokens of the sequence. `hidden` float32 [tokens, taps * hidden]:
        its states, where it has taps; valid until the target's next call."""

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        """Guess what follows `tokens`, all of them committed, the target has read all but the last: at most `limit`
        positions ahead.

        `chooser` makes the target's choices: a proposer that has logits chooses with it, under the same noise.
        An empty proposal means plain decoding for this round.
        """
