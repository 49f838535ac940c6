"""What one generation did, and where its time went."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

STAGES = ("prefill", "propose", "verify", "accept", "commit", "text")


class Statistics:
    """Counters of one generation. Times in seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.reused_tokens = 0  # of the prompt, not read again
        self.emitted = 0
        self.rounds = 0
        self.proposed = 0  # nodes
        self.proposed_at: Counter[int] = Counter()  # by position after the last committed token, from 0
        self.accepted_at: Counter[int] = Counter()
        self.accepted_of: Counter[str] = Counter()  # by source
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._stages = {stage: _Stage(self, stage) for stage in STAGES}
        self._started = time.perf_counter()
        self.total_seconds = 0.0

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """What is done within counts for `stage`."""
        return self._stages[stage]

    def add(self, stage: str, start: float) -> None:
        """It took from `start`, by time.perf_counter(), until now."""
        now = time.perf_counter()
        self.seconds[stage] += now - start
        self.total_seconds = now - self._started

    def count_round(self, depths: Sequence[int], accepted: int, source: str) -> None:
        """`depths`: of the proposed nodes, from 1; `accepted`: length of the accepted path; `source`: who guessed."""
        self.accepted_of[source] += accepted
        self.rounds += 1
        self.proposed += len(depths)
        self.proposed_at.update(range(max(depths, default=0)))
        self.accepted_at.update(range(accepted))

    @property
    def tok_s(self) -> float:
        """Emitted tokens per second from the request to the last token, prefill included."""
        return self.emitted / self.total_seconds if self.total_seconds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time of all rounds."""
        return sum(self.seconds[stage] for stage in ("propose", "verify", "accept", "commit"))

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, correction or bonus included."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def acceptance_per_position(self) -> list[float]:
        """Share of the proposals that reach the i-th position of which a token was accepted there."""
        return [self.accepted_at[index] / self.proposed_at[index] for index in sorted(self.proposed_at)]

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.emitted,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted_at.total(),
            "acceptance_per_position": self.acceptance_per_position(),
            "seconds": {**self.seconds, "total": self.total_seconds},
        }


class _Stage(AbstractContextManager[None]):
    """Entered several times a round: a generator would take longer than some of what it times."""

    def __init__(self, statistics: Statistics, name: str) -> None:
        self._statistics, self._name = statistics, name
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._statistics.add(self._name, self._start)
