"""How far to speculate, decided before every round: so that the tokens expected per second are most.

What a call costs is measured while engines run, as a line through (rows, seconds); how much of a proposal is accepted,
for each request and overall. From both a model says which way to speculate would bring all running requests most tokens
per second. Whether to speculate at all is decided by what rounds of either kind brought in truth, everything included,
for batches of about this size; the kind that was not chosen is tried now and then. Where nothing is proposed, guesses
are still made sometimes and compared with what the target chose (a probe). Nothing of this changes a token.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.engines.manifest import TARGET
from specrun.runner.logits import ACCEPT, FUSE, GUESS
from specrun.runner.types import Proposal, Source

Array = np.ndarray[Any, Any]

LOOKUP_REACHES = (0, 1, 2, 4, 8, 16, 32, 64)  # positions ahead that are considered
DRAFT_REACHES = (0, 1, 2, 3, 4, 6, 8, 16)
DECIDE_EVERY = 4  # rounds
FORGET_CALLS = 0.995  # per call of an engine
FORGET_ROUNDS = 0.95  # per round of a request
FORGET_THROUGHPUT = 0.99  # per round of a request
TRY_PLAIN_EVERY, TRY_SPECULATING_EVERY, TRY_SOON = 48, 96, 16  # decisions
HOPELESS = 0.8  # gain
PRIOR_WEIGHT = 4.0  # guesses that the overall rate counts for in a request's own
LEAST_GAIN = 1.03  # another way must promise so much more than the present one
PROBE_LOOKUP_EVERY = 8  # rounds of a request: costs next to nothing
PROBE_DRAFT_EVERY = 128  # rounds of all requests together: the draft has to read what it missed


class CallCosts:
    """Seconds of an engine's calls by rows: batch times width."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # of 1, rows, rows^2, seconds, rows * seconds

    def observe(self, engine: str, rows: int, seconds: float) -> None:
        sums = self._sums.setdefault(engine, [0.0] * 5)
        terms = 1.0, float(rows), float(rows * rows), seconds, rows * seconds
        self._sums[engine] = [FORGET_CALLS * old + new for old, new in zip(sums, terms, strict=True)]

    def predict(self, engine: str, rows: float) -> float | None:
        """None before anything was measured."""
        if engine not in self._sums:
            return None
        count, total, squares, seconds, products = self._sums[engine]
        spread = count * squares - total * total
        mean = seconds / count
        if spread <= 1e-9 * count * squares:  # always the same width
            return mean
        slope = max(0.0, (count * products - total * seconds) / spread)
        return max(mean * 0.1, mean + slope * (rows - total / count))


class Throughput:
    """Tokens per second of one request, decayed."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0.0, 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        self._tokens = FORGET_THROUGHPUT * self._tokens + tokens
        self._seconds = FORGET_THROUGHPUT * self._seconds + seconds

    @property
    def rate(self) -> float:
        return self._tokens / self._seconds


class Rate:
    """A share that is estimated from decayed counts, with `prior` where there are few."""

    def __init__(self, start: float) -> None:
        self._hits, self._tries, self._start = 0.0, 0.0, start

    def learn(self, hits: float, tries: float, forget: float = FORGET_ROUNDS) -> None:
        if tries:
            self._hits, self._tries = forget * self._hits + hits, forget * self._tries + tries

    def value(self, prior: float | None = None) -> float:
        start = self._start if prior is None else prior
        return (self._hits + PRIOR_WEIGHT * start) / (self._tries + PRIOR_WEIGHT)


@dataclass(frozen=True)
class Reach:
    """Positions ahead that a round may guess."""

    lookup: int
    draft: int


NOWHERE = Reach(0, 0)


@dataclass(frozen=True)
class DraftCost:
    """What a draft's guesses take: calls of `engine` for each position, or one call in all."""

    engine: str
    per_position: bool
    breadth: int  # rows of a call, from the second on


class Pace:
    """Shared by all requests of a runner or a server."""

    def __init__(self, costs: CallCosts) -> None:
        self.costs = costs
        self.accepted: dict[Source, Rate] = {"lookup": Rate(0.6), "draft": Rate(0.5)}
        self.found: dict[Source, Rate] = {"lookup": Rate(0.3), "draft": Rate(0.9)}  # how often there is a guess at all
        self.nodes = Rate(1.0)  # proposed nodes per position of a draft's reach
        self.running: list[RequestPace] = []
        self.decisions: dict[Reach, int] = {}  # how often each was taken
        self._present = NOWHERE
        self._decided_at = -1
        self.round = 0  # of all requests together
        self._probed_at = 0
        self._measured: dict[tuple[int, bool], Throughput] = {}  # by batch, and whether rounds speculated
        self._since_other = 0  # decisions
        self._fresh = 0  # rounds that are still to be left out

    @contextmanager
    def request(self, sources: Iterable[Source], reach: Reach, cost: DraftCost | None) -> "Iterator[RequestPace]":
        """One request while it runs. `reach`: the furthest allowed. `cost`: of its draft, if it has one."""
        pace = RequestPace(self, frozenset(sources), reach, cost)
        self.running.append(pace)
        self._decided_at = -1
        try:
            yield pace
        finally:
            self.running.remove(pace)
            self._decided_at = -1

    def decide(self) -> Reach:
        """For the next round of all that run."""
        if self._decided_at < 0 or self.round - self._decided_at >= DECIDE_EVERY * len(self.running):
            self._decided_at = self.round
            self._present = self._choose()
            self._fresh = len(self.running)
        self.decisions[self._present] = self.decisions.get(self._present, 0) + 1
        return self._present

    def _choose(self) -> Reach:
        """Among the ways to speculate the model's favourite; whether to speculate at all, what was measured. The other
        one is tried now and then."""
        promised = self._promises()
        ways = [reach for reach in promised if reach != NOWHERE]
        if not ways:
            return NOWHERE
        speculating = max(ways, key=lambda reach: promised[reach])
        gain = promised[speculating] / promised[NOWHERE]
        measured = [self._measured.get((self._bucket, kind)) for kind in (False, True)]
        if measured[0] is not None and measured[1] is not None:
            gain = measured[1].rate / measured[0].rate
        pays = gain > LEAST_GAIN
        self._since_other += 1
        if self._since_other >= self._patience(pays, promised[speculating] / promised[NOWHERE]):
            self._since_other = 0
            pays = not pays
        return speculating if pays else NOWHERE

    def _patience(self, pays: bool, promised: float) -> float:
        """Decisions until the other kind is tried: soon if the model contradicts what was measured, never if it is sure
        that speculation would only cost. `promised`: its gain."""
        if pays:
            return TRY_PLAIN_EVERY if promised > LEAST_GAIN else TRY_SOON
        if promised < HOPELESS:
            return math.inf
        return TRY_SOON if promised > LEAST_GAIN else TRY_SPECULATING_EVERY

    @property
    def _bucket(self) -> int:
        """Batches that behave alike."""
        return len(self.running).bit_length()

    def took(self, speculated: bool, tokens: int, seconds: float) -> None:
        """What one request got out of one round of all. Not of the first after a decision, when drafts catch up."""
        if self._fresh > 0:
            self._fresh -= 1
            return
        measured = self._measured.setdefault((self._bucket, speculated), Throughput())
        measured.learn(tokens, seconds)

    def forget_throughput(self) -> None:
        """What was measured so far was no real work."""
        self._measured.clear()

    def may_probe_draft(self) -> bool:
        """Whether it is time for a draft to guess for nothing: now and then for all requests together, because its call
        makes all of them wait."""
        if self.round - self._probed_at < PROBE_DRAFT_EVERY * len(self.running):
            return False
        self._probed_at = self.round
        return True

    def _promises(self) -> dict[Reach, float]:
        """Tokens per second of all requests together, for every way to speculate. Engines not measured yet cost
        nothing, so that they are tried."""
        lookups = [reach for reach in LOOKUP_REACHES if reach <= max(pace.reach.lookup for pace in self.running)]
        drafts = [reach for reach in DRAFT_REACHES if reach <= max(pace.reach.draft for pace in self.running)]
        batch = len(self.running)
        found = np.array([pace.found_rate("lookup") for pace in self.running])
        drafted = np.array([pace.found_rate("draft") for pace in self.running])
        looked = np.array([[pace.gain("lookup", reach) for reach in lookups] for pace in self.running])
        guessed = np.array([[pace.gain("draft", reach) for reach in drafts] for pace in self.running])
        overhead = self.costs.predict(ACCEPT, 1) or 0.0, self.costs.predict(GUESS, 1) or 0.0
        return {
            Reach(lookup, draft): self._promise(
                Reach(lookup, draft),
                batch,
                found if lookup else np.zeros(batch),
                drafted if draft else np.zeros(batch),
                looked[:, at],
                guessed[:, index],
                overhead,
            )
            for at, lookup in enumerate(lookups)
            for index, draft in enumerate(drafts)
        }

    def _promise(
        self,
        reach: Reach,
        batch: int,
        found: Array,
        drafted: Array,
        looked: Array,
        guessed: Array,
        overhead: tuple[float, float],
    ) -> float:
        """`found`, `drafted`: how often each request has a guess of either kind where it is asked; `looked`, `guessed`:
        what those bring; `overhead`: seconds to accept a token and to make a draft's guess."""
        drafted = (1 - found) * drafted
        tokens = batch + float((found * looked).sum() + (drafted * guessed).sum())
        width = 1 + max(
            (1 - float(np.prod(1 - found))) * reach.lookup,
            (1 - float(np.prod(1 - drafted))) * self.nodes.value() * reach.draft,
        )
        seconds = (self.costs.predict(TARGET, batch * width) or 1.0) + tokens * overhead[0]
        if reach.draft:
            seconds += self._draft_seconds(reach.draft, batch, overhead[1]) * (1 - float(np.prod(found)))
        return tokens / seconds

    def _draft_seconds(self, positions: int, batch: int, guess: float) -> float:
        """What the drafts of all requests take together."""
        kinds = {pace.cost for pace in self.running if pace.cost is not None}
        seconds = batch * (self.costs.predict(FUSE, 1) or 0.0)
        for cost in kinds:
            seconds += (self.costs.predict(cost.engine, batch) or 0.0) + batch * guess
            if cost.per_position:
                call = self.costs.predict(cost.engine, batch * cost.breadth) or 0.0
                seconds += (positions - 1) * (call + batch * cost.breadth * guess)
        return seconds


class RequestPace:
    """One request's share in the decision, and what it learns."""

    def __init__(self, pace: Pace, sources: frozenset[Source], reach: Reach, cost: DraftCost | None) -> None:
        self._pace = pace
        self.sources, self.reach, self.cost = sources, reach, cost
        self._accepted: dict[Source, Rate] = {source: Rate(0.5) for source in sources}
        self._found: dict[Source, Rate] = {source: Rate(0.5) for source in sources}
        self._rounds = 0
        self.next = NOWHERE
        self.probing = False
        self._decided = NOWHERE

    def plan(self) -> int:
        """Positions ahead that the next round may guess, by whichever source; `next` tells them apart. A probe is not
        to be verified."""
        decided = self._pace.decide()
        self._decided = decided
        self.next = Reach(min(decided.lookup, self.reach.lookup), min(decided.draft, self.reach.draft))
        self.probing = False
        if self.next == NOWHERE:
            lookup = min(1, self.reach.lookup) if self._rounds % PROBE_LOOKUP_EVERY == 0 else 0
            draft = 1 if self.reach.draft and self._pace.may_probe_draft() else 0
            self.next = Reach(lookup, draft)
            self.probing = self.next != NOWHERE
        self._rounds += 1
        return max(self.next.lookup, self.next.draft)

    def learn(self, proposal: Proposal, accepted: int, seconds: float) -> None:
        """`accepted`: guesses of `proposal` that were the target's choices, for a probe at most one. `seconds`: that
        the round took."""
        self._pace.round += 1
        if not self.probing:
            self._pace.took(self._decided != NOWHERE, 1 + accepted, seconds)
        source: Source = "lookup" if proposal.source == "prediction" else proposal.source
        depth = max(proposal.depths(), default=0)
        looked_up = self.next.lookup > 0 and "lookup" in self.sources
        if looked_up:
            self._learn_found("lookup", source == "lookup" and depth > 0)
        if self.next.draft and not (looked_up and source == "lookup" and depth):
            self._learn_found("draft", depth > 0)
        if not depth:
            return
        tries = min(depth, accepted + 1)
        self._accepted[source].learn(accepted, tries)
        self._pace.accepted[source].learn(accepted, tries, FORGET_CALLS)
        if source == "draft" and self.next.draft:
            self._pace.nodes.learn(len(proposal.tokens), self.next.draft, FORGET_CALLS)

    def _learn_found(self, source: Source, found: bool) -> None:
        self._found[source].learn(float(found), 1.0)
        self._pace.found[source].learn(float(found), 1.0, FORGET_CALLS)

    def found_rate(self, source: Source) -> float:
        """How often `source` has a guess, where it is asked."""
        return self._found[source].value(self._pace.found[source].value()) if source in self.sources else 0.0

    def gain(self, source: Source, positions: int) -> float:
        """Accepted guesses of `positions`, if each is accepted as often as the first."""
        positions = min(positions, self.reach.lookup if source == "lookup" else self.reach.draft)
        if not positions or source not in self._accepted:
            return 0.0
        rate = self._accepted[source].value(self._pace.accepted[source].value())
        return positions if math.isclose(rate, 1.0) else rate * (1 - rate**positions) / (1 - rate)
