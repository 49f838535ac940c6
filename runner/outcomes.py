"""How far promises about rounds with and without a draft hold, learned where rounds of both kinds are neighbours.

Traffic changes what rounds bring by more than a draft does: prompts that are read in between, how full the batch is. So
what is learned is a ratio, and only from neighbours: what the first rounds after a change of kind brought of their
promise, against what the last rounds before it did. Rounds in which a lookup found something tell nothing of a draft,
and bring now one token and now ten: they are left out.

A few rounds tell little, so a comparison counts by how sure it is (a Kalman filter of one number).
"""

import math
from dataclasses import dataclass

FORGET = 0.98  # per round of a request: what counts as the last rounds
FEWEST, ENOUGH = 4, 64  # rounds of requests that a comparison is made of
FAR = 2000  # rounds of requests between neighbours, at most
# Logarithms of ratios: how far a promise may be off before anything is known, and how far that changes from one
# comparison to the next.
FIRST_DOUBT, DRIFT = 0.1, 0.03
# A draft that brought more than was promised may bring no more of that in the next traffic; that its promise holds is
# enough to ask it. One that brought less must not be asked on a promise.
MOST_PRAISE = 0.05
SPREADS = {True: 0.5, False: 0.15}  # of what a round with and without a draft brings, relative to the mean
SURPRISE = 2.5  # times what chance makes of it: something has changed, what was known before counts no more
LARGEST = 0.7  # logarithm of a ratio: what is more is a disturbance


@dataclass
class _Stay:
    """Rounds of one kind that follow each other."""

    drafting: bool
    before: float | None  # what the other kind kept just before
    rounds_before: int  # that this was seen in, as far as they count
    tokens: float = 0.0
    promised: float = 0.0
    recent_tokens: float = 0.0
    recent_promised: float = 0.0
    count: int = 0
    last_round: int = 0
    compared: bool = False

    @property
    def recent(self) -> float:
        return self.recent_tokens / self.recent_promised


class Outcomes:
    """Of batches of about one size."""

    def __init__(self) -> None:
        self._stay: _Stay | None = None
        self._log_ratio, self._doubt = 0.0, FIRST_DOUBT**2  # and its variance

    def learn(self, drafting: bool, rounds: int, tokens: int, promised: float, now: int) -> None:
        """One request got `tokens` out of rounds that promised `promised` together. `now`: number of the last round."""
        stay = self._stay
        if stay is None or stay.drafting != drafting:
            before, rounds_before = None, 0
            if stay is not None:
                self._compare(stay)
                before = stay.recent if now - stay.last_round <= FAR else None
                rounds_before = min(stay.count, ENOUGH)
            stay = self._stay = _Stay(drafting, before, rounds_before)
        stay.tokens, stay.promised = stay.tokens + tokens, stay.promised + promised
        kept = FORGET**rounds
        stay.recent_tokens = kept * stay.recent_tokens + tokens
        stay.recent_promised = kept * stay.recent_promised + promised
        stay.count, stay.last_round = stay.count + rounds, now
        if stay.count >= ENOUGH:
            self._compare(stay)

    def _compare(self, stay: _Stay) -> None:
        if stay.compared or stay.before is None or stay.count < FEWEST:
            return
        stay.compared = True
        found = math.log(stay.tokens / stay.promised / stay.before) * (1 if stay.drafting else -1)
        found = min(LARGEST, max(-LARGEST, found))
        chance = SPREADS[stay.drafting] ** 2 / stay.count + SPREADS[not stay.drafting] ** 2 / stay.rounds_before
        surprise = found - self._log_ratio
        self._doubt += DRIFT**2
        if surprise**2 > SURPRISE**2 * (self._doubt + chance):
            self._doubt = surprise**2 - chance
        weight = self._doubt / (self._doubt + chance)
        self._doubt *= 1 - weight
        self._log_ratio = min(MOST_PRAISE, self._log_ratio + weight * surprise)

    @property
    def ratio(self) -> float:
        """Of what rounds with a draft keep of their promise to what rounds without keep."""
        return math.exp(self._log_ratio)

    def kept(self, drafting: bool) -> float:
        """What part of its promise a round of this kind keeps at present."""
        if self._stay is None:
            return 1.0
        if self._stay.drafting == drafting:
            return self._stay.recent
        return self._stay.recent * (self.ratio if drafting else 1 / self.ratio)
