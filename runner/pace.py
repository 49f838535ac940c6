"""How far to speculate, decided before every round: so that the tokens expected per second are most.

What a call costs is measured while engines run, as a line through (rows, seconds); how much of a proposal is accepted,
for each request and overall. Both forget slowly. From them follows, for each way to speculate, how many tokens
a round of all running requests brings and how long it takes; plain decoding is one of the ways. Where nothing is
proposed, guesses are still made now and then and compared with what the target chose (a probe), so that speculation
comes back when it would pay. Nothing of this changes a token.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specrun.runner.logits import ACCEPT, FUSE, GUESS
from specrun.runner.types import Proposal, Source

LOOKUP_REACHES = (0, 1, 2, 4, 8, 16, 32, 64)  # positions ahead that are considered
DRAFT_REACHES = (0, 1, 2, 3, 4, 6, 8, 16)
DECIDE_EVERY = 4  # rounds
FORGET_CALLS = 0.995  # per call of an engine
FORGET_ROUNDS = 0.95  # per round of a request
PRIOR_WEIGHT = 4.0  # guesses that the overall rate counts for in a request's own
LEAST_GAIN = 1.03  # another way must promise so much more than the present one
PROBE_EVERY = 32  # rounds of a request


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
            promised = {reach: self._tokens_per_second(reach) for reach in self._ways()}
            best = max(promised, key=lambda reach: promised[reach])
            present = promised.get(self._present)
            if promised[best] < LEAST_GAIN * promised[NOWHERE]:
                self._present = NOWHERE
            elif present is None or self._present == NOWHERE or promised[best] > LEAST_GAIN * present:
                self._present = best
        self.decisions[self._present] = self.decisions.get(self._present, 0) + 1
        return self._present

    def _ways(self) -> Iterator[Reach]:
        furthest = max((pace.reach.lookup for pace in self.running), default=0)
        furthest_draft = max((pace.reach.draft for pace in self.running), default=0)
        for lookup in LOOKUP_REACHES:
            for draft in DRAFT_REACHES:
                if lookup <= furthest and draft <= furthest_draft:
                    yield Reach(lookup, draft)

    def _tokens_per_second(self, reach: Reach) -> float:
        """All requests together; unmeasured engines cost nothing, so that they are tried."""
        batch = len(self.running)
        tokens, draft_seconds, accept_seconds = 0.0, 0.0, 0.0
        none_found: dict[Source, float] = {"lookup": 1.0, "draft": 1.0}  # the chance that no request has a guess
        for pace in self.running:
            expected = pace.expected_tokens(reach)
            tokens += expected
            accept_seconds += self.costs.predict(ACCEPT, expected) or 0.0
            found = pace.found_rate("lookup") if min(reach.lookup, pace.reach.lookup) else 0.0
            none_found["lookup"] *= 1 - found
            if min(reach.draft, pace.reach.draft) and pace.cost is not None:
                none_found["draft"] *= 1 - (1 - found) * pace.found_rate("draft")
                calls = min(reach.draft, pace.reach.draft) if pace.cost.per_position else 1
                seconds = self.costs.predict(pace.cost.engine, batch) or 0.0
                seconds = calls * (seconds + batch * (self.costs.predict(GUESS, 1) or 0.0))
                seconds += batch * (self.costs.predict(FUSE, 1) or 0.0)
                draft_seconds = max(draft_seconds, (1 - found) * seconds)
        width = 1 + max(
            (1 - none_found["lookup"]) * reach.lookup,
            (1 - none_found["draft"]) * self.nodes.value() * reach.draft,
        )
        verify_seconds = self.costs.predict("target", batch * width) or 1.0
        return tokens / (verify_seconds + draft_seconds + accept_seconds)


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

    def plan(self) -> int:
        """Positions ahead that the next round may guess, by whichever source; `next` tells them apart. A probe is not
        to be verified."""
        self._rounds += 1
        decided = self._pace.decide()
        self.next = Reach(min(decided.lookup, self.reach.lookup), min(decided.draft, self.reach.draft))
        self.probing = False
        if self.next == NOWHERE and self._rounds % PROBE_EVERY == 1:
            self.probing = True
            self.next = Reach(min(1, self.reach.lookup), min(1, self.reach.draft))
        return max(self.next.lookup, self.next.draft)

    def learn(self, proposal: Proposal, accepted: int) -> None:
        """`accepted`: guesses of `proposal` that were the target's choices; for a probe at most one."""
        self._pace.round += 1
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

    def expected_tokens(self, reach: Reach) -> float:
        """Of one round."""
        lookup, draft = min(reach.lookup, self.reach.lookup), min(reach.draft, self.reach.draft)
        found = self.found_rate("lookup") if lookup else 0.0
        drafted = self.found_rate("draft") if draft else 0.0
        return 1 + found * self._gain("lookup", lookup) + (1 - found) * drafted * self._gain("draft", draft)

    def _gain(self, source: Source, positions: int) -> float:
        """Accepted guesses of `positions`, if each is accepted as often as the first."""
        if not positions or source not in self._accepted:
            return 0.0
        rate = self._accepted[source].value(self._pace.accepted[source].value())
        return positions if math.isclose(rate, 1.0) else rate * (1 - rate**positions) / (1 - rate)
