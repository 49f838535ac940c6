"""How far to speculate, so that the tokens expected per second are most. Nothing of this changes a token.

Two decisions, from what calls cost on this machine (`runner/call_costs.py`) and what was accepted so far:

* Before a round guesses, whether a draft is asked, and how far ahead. A lookup costs nothing, it is always made.
* When all guesses of a round are there, how many of them the target verifies: a row costs every request of the batch,
  so a few good guesses may not be worth it. Guesses that are not verified are compared with what the target chose, so
  that their rate stays known.

Whether a draft pays is easily mistaken by a few per cent, so what rounds with and without it brought is held against
what was promised, and corrects it (`runner/outcomes.py`). The way that looks worse is tried now and then, as long as
all such tries together cost no more than a small share of the time.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.engines.manifest import TARGET
from specrun.runner.allowance import DRAFT_TRY, PLAIN_TRY, PROBE, Allowance
from specrun.runner.call_costs import CallCosts
from specrun.runner.logits import ACCEPT, FUSE, GUESS
from specrun.runner.outcomes import Outcomes
from specrun.runner.types import ROOT, Proposal, Source, Verdict

Array = np.ndarray[Any, Any]

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # nodes that may be verified
REACHES = (0, 1, 2, 3, 4, 6, 8, 16)  # positions ahead that a draft may guess
DECIDE_EVERY = 8  # rounds
LEAST_GAIN = 1.03  # verifying must promise so much more than not
LEAST_DRAFT_GAIN = 1.05  # so must asking a draft
FORGET_ROUNDS = 0.95  # per round of a request
FORGET_OVERALL = 0.995  # per round of any request
PRIOR_WEIGHT = 4.0  # guesses that the overall rate counts for in a request's own
TRY_EVERY = 8  # decisions, at least, between tries of the way that looks worse
PROBE_EVERY = 128  # rounds of all requests together, at least, between guesses of a draft that is not used
ALWAYS = 1 - 1e-9  # a rate of acceptance that is as good as 1, and can be reckoned with
LONG = 128  # rounds that a request is thought to go on for at most


# Gets what was decided, as JSON has it.
Trace = Callable[[dict[str, Any]], None]


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
    catches_up: bool  # it has to read what it missed


@dataclass(frozen=True)
class Decision:
    """What holds for the next rounds of all requests."""

    batch: int  # requests that it was made for
    draft: int  # positions ahead
    # Tokens per second of all requests together: of rounds in which no lookup finds anything, and of the better way,
    # which is another one if this is a try.
    promised: float
    alternative: float
    tries: bool

    @property
    def kind(self) -> str:
        return DRAFT_TRY if self.draft else PLAIN_TRY


class Pace:
    """Shared by all requests of a runner or a server."""

    def __init__(
        self,
        costs: CallCosts,
        meet: Callable[[], None] = lambda: None,
        trace: Trace | None = None,
    ) -> None:
        """`meet`: returns when every other request of the round has its guesses, too. `trace`: gets every decision."""
        self.costs = costs
        self.meet = meet
        self.trace = trace
        self.accepted: dict[Source, Rate] = {"lookup": Rate(0.6), "draft": Rate(0.5)}
        self.found: dict[Source, Rate] = {"lookup": Rate(0.3), "draft": Rate(0.9)}  # how often there is a guess at all
        self.filled: dict[Source, Rate] = {"lookup": Rate(1.0), "draft": Rate(1.0)}  # nodes verified per position
        self.running: list[RequestPace] = []
        self.drafted: dict[int, int] = {}  # rounds by how far a draft was to guess
        self.verified: dict[int, int] = {}  # rounds with guesses by how many nodes were verified at most
        self.allowance = Allowance()
        self.round = 0  # of all requests together
        self._decision = Decision(1, 0, 0.0, 0.0, tries=False)
        self._decided_at, self._decided_for = -1, 0
        self._since_try = 0  # decisions
        self._probed_at = 0
        self._outcomes: dict[int, Outcomes] = {}  # by size of the batch
        self._verification: dict[int, tuple[Array, float]] = {}  # by requests, since the last decision
        self._offers: dict[RequestPace, Array | None] = {}
        self._cap = 0

    @contextmanager
    def request(
        self,
        sources: Iterable[Source],
        reach: Reach,
        cost: DraftCost | None,
        tokens: int,
        remaining: int,
        reused: int = 0,
    ) -> "Iterator[RequestPace]":
        """One request while it runs. `reach`: the furthest allowed. `cost`: of its draft, if it has one. `tokens`: of
        its prompt; `remaining`: that it may write; `reused`: of the prompt, that need not be read."""
        pace = RequestPace(self, frozenset(sources), reach, cost, tokens, remaining, reused)
        if not self.running:
            self._decided_at = -1
        self.running.append(pace)
        try:
            yield pace
        finally:
            pace.report()
            self.running.remove(pace)
            self._offers.pop(pace, None)

    # ------------------------------------------------------------------------------------- whether a draft is asked

    def decide(self) -> Decision:
        """For the next round of all that run."""
        batch = len(self.running)
        due = self.round - self._decided_at >= DECIDE_EVERY * batch
        if self._decided_at < 0 or due or batch.bit_length() != self._decided_for:
            for pace in self.running:
                pace.report()
            self._decided_at, self._decided_for = self.round, batch.bit_length()
            self._verification.clear()
            self._decision = self._choose()
            self._trace("draft", reach=self._decision.draft, tries=self._decision.tries)
        self.drafted[self._decision.draft] = self.drafted.get(self._decision.draft, 0) + 1
        return self._decision

    def _choose(self) -> Decision:
        reaches = [reach for reach in REACHES if reach <= max(pace.reach.draft for pace in self.running)]
        batch = len(self.running)
        if len(reaches) == 1:
            return Decision(batch, 0, 0.0, 0.0, tries=False)
        found = np.array([pace.found_rate("lookup") for pace in self.running])
        promised = self._promises(reaches, found)
        with_draft = 1 + int(np.argmax(promised[1:]))
        outcomes = self._outcomes_for(batch)
        rates = [float(promised[at]) * outcomes.kept(at > 0) for at in (0, with_draft)]
        better = int(rates[1] > LEAST_DRAFT_GAIN * rates[0])
        chosen = better
        self._since_try += 1
        other = PLAIN_TRY if better else DRAFT_TRY
        cost = None if better else self._draft_try_seconds(reaches[with_draft])
        if self._since_try >= TRY_EVERY and self.allowance.allows(batch, other, cost):
            self._since_try = 0
            self.allowance.begin(batch, other)
            chosen = 1 - better
        at = (0, with_draft)[chosen]
        (without_lookup,) = self._promises([reaches[at]], np.zeros(batch))
        return Decision(batch, reaches[at], float(without_lookup), rates[better], tries=chosen != better)

    def _draft_try_seconds(self, reach: int) -> float:
        """What the drafts of all requests take until the next decision, reading what they missed included."""
        reading = sum(pace.catch_up_call() for pace in self.running)
        return reading + DECIDE_EVERY * float(self._draft_seconds(reach, len(self.running)))

    def _outcomes_for(self, batch: int) -> Outcomes:
        """Those of batches of about this size."""
        return self._outcomes.setdefault(batch.bit_length(), Outcomes())

    def learn_outcome(self, decision: Decision, got: "Got") -> None:
        """What one request got out of rounds."""
        self.allowance.go_by(got.seconds)
        if not decision.promised:
            return
        if decision.tries:
            self.allowance.spend(decision.batch, decision.kind, got.seconds - got.tokens / decision.alternative)
        if got.usual_rounds:
            promised = got.usual_seconds * decision.promised
            outcomes = self._outcomes_for(decision.batch)
            outcomes.learn(decision.draft > 0, got.usual_rounds, got.usual_tokens, promised, self.round)

    def forget_outcomes(self) -> None:
        """What was done so far was no real work."""
        self._outcomes.clear()

    def may_probe(self) -> bool:
        """Whether a draft that is not used may guess once, for its rate: its call makes all requests wait."""
        batch = len(self.running)
        if self.round - self._probed_at < PROBE_EVERY * batch or not self.allowance.allows(batch, PROBE):
            return False
        self._probed_at = self.round
        self.allowance.begin(batch, PROBE)
        return True

    def _promises(self, reaches: list[int], found: Array) -> Array:
        """Tokens per second of all requests together, for a draft that reaches so far. `found`: how often the lookup of
        each finds something. Engines not measured yet cost nothing, so that they are tried."""
        batch = len(self.running)
        asked = (1 - found) * np.array([pace.found_rate("draft") for pace in self.running])
        means = np.array([self._mean_lookup(pace) for pace in self.running])
        looked = _gains(np.array([pace.accepted_rate("lookup") for pace in self.running]), means)
        rates = np.array([[pace.accepted_rate("draft")] for pace in self.running])
        guessed = _gains(rates, np.minimum.outer([pace.reach.draft for pace in self.running], reaches))
        tokens = batch + float(found @ looked) + asked @ guessed
        copied = (1 - float(np.prod(1 - found))) * means.max()
        at = np.array(reaches)
        drafted = (1 - float(np.prod(1 - asked))) * self.filled["draft"].value() * at
        seconds = self.costs.predict_all(TARGET, batch * (1 + np.maximum(copied, drafted)))
        if seconds is None:
            seconds = np.ones(len(reaches))
        seconds = seconds + tokens * (self.costs.predict(ACCEPT, 1) or 0.0)
        drafting = np.where(at > 0, self._draft_seconds(at, batch), 0.0)
        catching_up = sum(pace.catch_up_seconds() for pace in self.running) * (at > 0)
        return np.asarray(tokens / (seconds + drafting * (1 - float(np.prod(found))) + catching_up))

    def _mean_lookup(self, pace: "RequestPace") -> float:
        """Nodes of a lookup that are verified, on the average."""
        return self.filled["lookup"].value() * pace.reach.lookup

    def _draft_seconds(self, positions: Any, batch: int) -> Any:
        """What the drafts of all requests take together, for a number of positions, or for each of an array."""
        guess = self.costs.predict(GUESS, 1) or 0.0
        kinds = {pace.cost for pace in self.running if pace.cost is not None}
        first, further = batch * (self.costs.predict(FUSE, 1) or 0.0), 0.0
        for cost in kinds:
            first += (self.costs.predict(cost.engine, batch) or 0.0) + batch * guess
            if cost.per_position:
                call = self.costs.predict(cost.engine, batch * cost.breadth) or 0.0
                further += call + batch * cost.breadth * guess
        return first + (positions - 1) * further

    # ------------------------------------------------------------------------------- how many guesses are verified

    def cap(self, request: "RequestPace", expected: Array | None) -> int:
        """Nodes that each request may have verified in this round. `expected`: what `request` would get of SIZES; None:
        it has no guesses."""
        self._offers[request] = expected
        if expected is None:  # nothing hangs on what the others have
            return 0
        try:
            self.meet()
        except BaseException:
            self._offers.pop(request, None)
            raise
        if request in self._offers:  # the first one back decides for all
            self._cap = self._best_size(list(self._offers.values()))
            self._offers.clear()
            self.verified[self._cap] = self.verified.get(self._cap, 0) + 1
        return self._cap

    def _best_size(self, offers: list[Array | None]) -> int:
        """`offers`: of each request, as `cap` gets them."""
        guesses = [each for each in offers if each is not None]
        if not guesses:
            return 0
        batch = len(offers)
        tokens = batch + np.sum(guesses, axis=0)
        if tokens[-1] <= LEAST_GAIN * batch:  # more rows never cost less
            return 0
        seconds, accepting = self._verification_costs(batch)
        if seconds is None:
            return SIZES[-1]
        rates = tokens / (seconds + tokens * accepting)
        best = int(np.argmax(rates))
        size = SIZES[best] if rates[best] > LEAST_GAIN * rates[0] else 0
        self._trace("verify", nodes=size, gain=round(float(rates[best] / rates[0]), 3))
        return size

    def _verification_costs(self, batch: int) -> tuple[Array | None, float]:
        """Seconds of a call for each of SIZES, None before any was measured, and of accepting a token."""
        if batch not in self._verification:
            seconds = self.costs.predict_all(TARGET, batch * (1.0 + np.array(SIZES)))
            accepting = self.costs.predict(ACCEPT, 1) or 0.0
            if seconds is None:
                return None, accepting
            self._verification[batch] = seconds, accepting
        return self._verification[batch]

    def _trace(self, event: str, **more: Any) -> None:
        if self.trace is not None:
            self.trace({"time": time.time(), "event": event, "running": len(self.running), **more})


@dataclass
class Got:
    """What a request got out of rounds. Seconds are its part of them, where others run beside it. Usual rounds are
    those that tell something about the next ones; without the time in which drafts caught up."""

    tokens: int = 0
    seconds: float = 0.0
    usual_rounds: int = 0
    usual_tokens: int = 0
    usual_seconds: float = 0.0


class RequestPace:
    """One request's share in the decisions, and what it learns."""

    def __init__(
        self,
        pace: Pace,
        sources: frozenset[Source],
        reach: Reach,
        cost: DraftCost | None,
        tokens: int,
        remaining: int,
        reused: int,
    ) -> None:
        self._pace = pace
        self.sources, self.reach, self.cost = sources, reach, cost
        self._accepted: dict[Source, Rate] = {source: Rate(0.5) for source in sources}
        self._found: dict[Source, Rate] = {source: Rate(0.5) for source in sources}
        self.next = NOWHERE
        self._decision: Decision | None = None
        self._fresh = False
        self._probing = False
        self._began = 0.0
        self._got = Got()  # in rounds not reported yet
        self._tokens, self._remaining = tokens, remaining
        self._drafted_at = reused  # tokens when the draft was last asked
        self._read: tuple[float, float] = 0.0, 0.0  # seconds of wide calls so far, of target and draft

    def plan(self, tokens: int, remaining: int) -> int:
        """Positions ahead that the next round may guess, by whichever source; `next` tells them apart. `tokens`: there
        are so far; `remaining`: may follow at most."""
        self._tokens, self._remaining = tokens, remaining
        before, decision = self._decision, self._pace.decide()
        if decision is not before:
            self.report()
            self._decision = decision
        self._fresh = before is not None and (before.draft > 0) != (decision.draft > 0)
        draft = min(decision.draft, self.reach.draft)
        self._probing = not draft and self.reach.draft > 0 and self._pace.may_probe()
        self.next = Reach(self.reach.lookup, 1 if self._probing else draft)
        self._began, self._read = time.perf_counter(), self._reading()
        return max(self.next.lookup, self.next.draft)

    def report(self) -> None:
        """Have what it got since the last time made use of."""
        if self._decision is not None:
            self._pace.learn_outcome(self._decision, self._got)
            self._got = Got()

    def _reading(self) -> tuple[float, float]:
        costs = self._pace.costs
        return costs.reading(TARGET), 0.0 if self.cost is None else costs.reading(self.cost.engine)

    def catch_up_call(self) -> float:
        """Seconds that its draft would need to read what it missed."""
        if self.cost is None or not self.cost.catches_up:
            return 0.0
        return self._pace.costs.predict(self.cost.engine, self._tokens - self._drafted_at) or 0.0

    def catch_up_seconds(self) -> float:
        """The same for each of the rounds that are left."""
        return self.catch_up_call() / min(self._remaining, LONG)

    def settle(self, guesses: Proposal) -> Proposal:
        """What of `guesses` is verified."""
        if self._probing:
            self._pace.allowance.spend(len(self._pace.running), PROBE, time.perf_counter() - self._began)
        return guesses.first(self._pace.cap(self, self._expected(guesses)))

    def _expected(self, guesses: Proposal) -> Array | None:
        """Accepted tokens if so many nodes as SIZES are verified."""
        if not guesses.tokens:
            return None
        deepest = np.maximum.accumulate([0, *guesses.depths()])
        sizes = np.minimum(SIZES, len(guesses.tokens))
        return _gains(self.accepted_rate(_kind(guesses)), deepest[sizes])

    def learn(self, guesses: Proposal, verified: Proposal, verdict: Verdict, seconds: float) -> None:
        """`guesses`: as they went to `settle`, which made `verified` of them. `seconds`: that the round took."""
        accepted = len(verdict.path)
        self._pace.round += 1
        source = _kind(guesses)
        prompts, drafts = (now - then for now, then in zip(self._reading(), self._read, strict=True))
        usual = not (self._fresh or self._probing or (source == "lookup" and guesses.tokens))
        self._count(1 + accepted, seconds - prompts, drafts, usual)
        looked_up = self.next.lookup > 0 and "lookup" in self.sources
        if looked_up:
            self._learn_found("lookup", source == "lookup" and bool(guesses.tokens))
        if self.next.draft and not (looked_up and source == "lookup" and guesses.tokens):
            self._learn_found("draft", bool(guesses.tokens))
            self._drafted_at = self._tokens
        if not guesses.tokens:
            return
        hits, depth = accepted, max(verified.depths(), default=0)
        if not verified.tokens:  # the first guess is judged all the same
            hits, depth = int(verdict.next_token in guesses.children(ROOT)), 1
        tries = min(depth, hits + 1)
        self._accepted[source].learn(hits, tries)
        self._pace.accepted[source].learn(hits, tries, FORGET_OVERALL)
        wanted = self.next.lookup if source == "lookup" else self.next.draft
        if wanted and not self._probing:
            self._pace.filled[source].learn(len(verified.tokens), wanted, FORGET_OVERALL)

    def _count(self, tokens: int, seconds: float, catching_up: float, usual: bool) -> None:
        got, batch = self._got, len(self._pace.running)
        got.tokens += tokens
        got.seconds += seconds / batch
        if usual:
            got.usual_rounds += 1
            got.usual_tokens += tokens
            got.usual_seconds += (seconds - catching_up) / batch

    def _learn_found(self, source: Source, found: bool) -> None:
        self._found[source].learn(float(found), 1.0)
        self._pace.found[source].learn(float(found), 1.0, FORGET_OVERALL)

    def found_rate(self, source: Source) -> float:
        """How often `source` has a guess, where it is asked."""
        return self._found[source].value(self._pace.found[source].value()) if source in self.sources else 0.0

    def accepted_rate(self, source: Source) -> float:
        """How often a guess of `source` is accepted whose predecessors are."""
        if source not in self._accepted:
            return 0.0
        return self._accepted[source].value(self._pace.accepted[source].value())


def _gains(rates: Any, positions: Array) -> Array:
    """Accepted guesses of so many positions, if each is accepted at its rate."""
    rates = np.minimum(rates, ALWAYS)
    return np.asarray(rates * (1 - rates**positions) / (1 - rates))


def _kind(guesses: Proposal) -> Source:
    return "lookup" if guesses.source == "prediction" else guesses.source
