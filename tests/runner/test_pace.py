"""How far rounds speculate: what calls cost, what is accepted, and that speculation comes back when it pays again."""

import contextlib
import dataclasses
from typing import Any

import greenlet
import numpy as np
import pytest

from specrun.engines.manifest import TARGET
from specrun.runner.call_costs import CallCosts
from specrun.runner.logits import ACCEPT, GUESS
from specrun.runner.pace import DraftCost, Pace, Reach, RequestPace
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.types import EMPTY, Proposal, Verdict

STEP, ROW = 20e-3, 1e-3  # seconds of the pretended target
PROMPT = 100  # tokens


def test_costs_follow_what_was_seen() -> None:
    costs = CallCosts()
    assert costs.predict(TARGET, 3) is None
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(10):
            costs.observe(TARGET, rows, STEP + ROW * rows)
    for rows in (1, 5, 17, 40):
        assert costs.predict(TARGET, rows) == pytest.approx(STEP + ROW * rows, rel=0.02)


def test_sizes_between_the_groups_cost_what_they_were_seen_to_cost() -> None:
    """64 and 80 rows are of neighbouring groups, the second one's middle is 90."""
    costs = CallCosts()
    for _ in range(30):
        costs.observe("target", 64, 0.130)
        costs.observe("target", 80, 0.160)
    assert costs.predict("target", 80) == pytest.approx(0.160)
    assert costs.predict("target", 72) == pytest.approx(0.145)


def test_what_is_not_called_any_more_is_not_forgotten() -> None:
    """After a thousand calls of one size the others still cost what they did; a slower machine is slower for all."""
    costs = CallCosts()
    for rows in (1, 4, 16):
        for _ in range(5):
            costs.observe(TARGET, rows, STEP + ROW * rows)
    for _ in range(1000):
        costs.observe(TARGET, 1, STEP + ROW)
    assert costs.predict(TARGET, 16) == pytest.approx(STEP + 16 * ROW, rel=0.02)
    for _ in range(1000):
        costs.observe(TARGET, 1, 2 * (STEP + ROW))
    # The other sizes cannot be cheaper, but were hardly seen.
    assert costs.predict(TARGET, 1) == pytest.approx(2 * (STEP + ROW), rel=0.1)
    slower = costs.predict(TARGET, 16)
    assert slower is not None
    assert slower > 1.2 * (STEP + 16 * ROW)


def test_disturbed_calls_count_little_and_first_ones_not_at_all() -> None:
    costs = CallCosts()
    costs.observe(TARGET, 4, 1.0)  # memory was allocated
    for _ in range(20):
        costs.observe(TARGET, 4, 0.03)
    costs.observe(TARGET, 4, 3.0)
    assert costs.predict(TARGET, 4) == pytest.approx(0.03, rel=0.25)


def test_a_size_that_was_hardly_seen_does_not_make_wider_calls_dear() -> None:
    costs = CallCosts()
    for rows in (1, 8):
        for _ in range(30):
            costs.observe(TARGET, rows, STEP + ROW * rows)
    costs.observe(TARGET, 3, 5 * STEP)  # memory was allocated
    for rows in (3, 8):
        assert costs.predict(TARGET, rows) == pytest.approx(STEP + ROW * rows, rel=0.02)
    costs.observe(TARGET, 3, 5 * STEP)
    assert costs.predict(TARGET, 8) == pytest.approx(STEP + ROW * 8, rel=0.3)


class World:
    """Requests side by side, whose draft hits with a rate, on a machine where a draft's call takes `draft_seconds`, and
    a lookup finds with another rate what is right with a third."""

    def __init__(
        self,
        rate: float,
        draft_seconds: float,
        batch: int = 1,
        found: float = 0.0,
        lookup_rate: float = 0.0,
        hidden_seconds: float = 0.0,
    ) -> None:
        """`hidden_seconds`: that a round with a draft takes and no call accounts for."""
        self.rate, self.draft_seconds, self.batch, self.hidden_seconds = rate, draft_seconds, batch, hidden_seconds
        self.found, self.lookup_rate = found, lookup_rate
        self.slowness = 1.0  # of everything, whatever the engine's calls take
        self.costs = CallCosts()
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for _ in range(3):
                self.costs.observe(TARGET, rows, STEP + ROW * rows)
                self.costs.observe("eagle3", rows, draft_seconds)
                self.costs.observe(ACCEPT, rows, 1e-4 * rows)
                self.costs.observe(GUESS, rows, 1e-4 * rows)
        self.rng = np.random.default_rng(1)
        self.pace = Pace(self.costs, meet=self._meet)
        self.seconds, self.tokens, self.verified, self.asked, self.rounds_done = 0.0, 0, 0, 0, 0

    def _meet(self) -> None:
        here = greenlet.getcurrent()
        assert here.parent is not None
        here.parent.switch()

    def _settle(self, guessed: list[tuple[RequestPace, Proposal]]) -> list[Proposal]:
        """What of each is verified; each has offered its guesses when the first one goes on."""
        tasks = [greenlet.greenlet(request.settle) for request, _ in guessed]
        at_once = [task.switch(guesses) for task, (_, guesses) in zip(tasks, guessed, strict=True)]
        # A request without guesses waits for nobody.
        return [found if task.dead else task.switch() for task, found in zip(tasks, at_once, strict=True)]

    def _guesses(self, request: RequestPace) -> tuple[Proposal, float]:
        """And the rate at which they are right."""
        if request.next.lookup and self.rng.random() < self.found:
            return Proposal.chain([1] * request.next.lookup, "lookup"), self.lookup_rate
        return Proposal.chain([1] * request.next.draft) if request.next.draft else EMPTY, self.rate

    def round(self, requests: list[RequestPace]) -> None:
        drafting = 0.0
        guessed = []
        for request in requests:
            request.plan(PROMPT, 1000)
            guesses, rate = self._guesses(request)
            drafting = max(drafting, self.draft_seconds * len(guesses.tokens) * (guesses.source == "draft"))
            self.asked += request.next.draft > 0
            guessed.append((request, guesses, rate))
        settled = self._settle([(request, guesses) for request, guesses, _ in guessed])
        width = max(len(verified.tokens) for verified in settled)
        hidden = self.hidden_seconds * any(request.next.draft for request in requests)
        seconds = STEP + ROW * len(requests) * (1 + width) + drafting + hidden
        seconds *= self.slowness
        for (request, guesses, rate), verified in zip(guessed, settled, strict=True):
            hits = 0
            while hits < len(verified.tokens) and self.rng.random() < rate:
                hits += 1
            right = not verified.tokens and self.rng.random() < rate
            verdict = Verdict(tuple(range(hits)), 1 if right else 0)
            request.learn(guesses, verified, verdict, seconds)
            self.tokens += 1 + hits
            self.verified += len(verified.tokens)
        self.seconds += seconds
        self.rounds_done += len(requests)

    def rounds(self, count: int) -> "World":
        self.seconds, self.tokens, self.verified, self.asked, self.rounds_done = 0.0, 0, 0, 0, 0
        cost = DraftCost("eagle3", per_position=True, breadth=1, catches_up=True)
        with contextlib.ExitStack() as running:
            requests = [
                running.enter_context(self.pace.request(["lookup", "draft"], Reach(8, 4), cost, PROMPT, 1000))
                for _ in range(self.batch)
            ]
            for _ in range(count):
                self.round(requests)
        return self

    @property
    def drafting(self) -> float:
        """Share of the rounds in which the draft was asked."""
        return self.asked / self.rounds_done

    @property
    def gain(self) -> float:
        """Over plain decoding, as the pretended machine counts it."""
        return self.slowness * self.tokens / self.seconds * (STEP + ROW * self.batch) / self.batch


def test_a_good_cheap_draft_is_used_and_reaches_far() -> None:
    world = World(rate=0.9, draft_seconds=1e-3).rounds(2000)
    assert world.drafting > 0.9
    assert world.verified / world.rounds_done > 2
    assert world.gain > 1.8


def test_a_draft_that_never_hits_is_given_up() -> None:
    assert World(rate=0.02, draft_seconds=3e-3).rounds(4000).drafting < 0.1


def test_a_draft_as_slow_as_the_target_is_given_up() -> None:
    assert World(rate=0.5, draft_seconds=20e-3).rounds(4000).drafting < 0.1


def test_speculation_goes_off_and_comes_back() -> None:
    world = World(rate=0.02, draft_seconds=1e-3)
    world.rounds(3000)
    world.rate = 0.95
    assert world.rounds(20_000).drafting > 0.5
    world.rate = 0.0
    world.rounds(3000)
    assert world.rounds(3000).drafting < 0.2


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_never_slower_than_plain_decoding(rate: float, batch: int) -> None:
    """Finding out included, whatever the draft and the lookup are worth."""
    for found, lookup_rate in ((0.0, 0.0), (0.3, 0.1), (0.3, 0.9)):
        world = World(rate, 5e-3, batch, found, lookup_rate)
        world.rounds(200)
        assert world.rounds(800).gain > 0.97, (found, lookup_rate)


@pytest.mark.parametrize("batch", [1, 6])
def test_costs_that_no_call_accounts_for_are_noticed(batch: int) -> None:
    """By what rounds with and without a draft brought."""
    world = World(0.7, 1e-3, batch, hidden_seconds=30e-3)
    world.rounds(1000)
    assert world.rounds(1000).gain > 0.97


@pytest.mark.parametrize("batch", [1, 6])
def test_other_traffic_does_not_hide_that_a_draft_costs(batch: int) -> None:
    """All rounds become slower, by more than the draft brought; and the draft, from one round to the next, costs more
    than the target. Tries are dear then, and what was saved up for them goes at once."""
    world = World(0.7, 1e-3, batch)
    for slowness in (1.0, 1.6, 0.7):
        world.slowness, world.hidden_seconds = slowness, 0.0
        world.rounds(1000)
        world.hidden_seconds = 30e-3
        world.rounds(600)
        assert world.rounds(1200).gain > 0.96, slowness


def test_what_did_not_pay_once_is_tried_again_in_a_batch() -> None:
    world = World(0.7, 1e-3, batch=4, hidden_seconds=30e-3)
    world.rounds(2000)
    world.hidden_seconds = 0.0
    world.rounds(3000)
    assert world.rounds(500).gain > 1.1


def test_lucky_lookups_do_not_turn_a_good_draft_off() -> None:
    """They bring several tokens at once, in rounds with a draft and without."""
    shares = []
    for seed in range(6):
        world = World(0.45, 2e-3, found=0.1, lookup_rate=0.95)
        world.rng = np.random.default_rng(seed)
        shares += [world.rounds(100).drafting for _ in range(10)]
    assert np.mean(shares) > 0.65, shares


def test_few_good_guesses_do_not_widen_a_large_batch() -> None:
    """A row for one request is a row for all: what pays alone does not among sixteen."""
    alone, many = (World(0.0, 5e-3, batch, found=0.1, lookup_rate=0.8) for batch in (1, 16))
    assert alone.rounds(1000).verified > 100
    many.pace.accepted["lookup"].learn(80, 100)
    assert many.rounds(200).verified < 0.2 * many.rounds_done
    assert many.gain > 0.97


def test_the_rate_of_guesses_that_are_not_verified_stays_known() -> None:
    world = World(0.0, 5e-3, batch=4, found=0.5, lookup_rate=0.0)
    world.rounds(300)
    world.lookup_rate = 0.95
    assert world.rounds(300).gain > 1.2


def test_decisions_can_be_traced() -> None:
    world = World(0.9, 1e-3)
    events: list[dict[str, Any]] = []
    world.pace.trace = events.append
    world.rounds(20)
    assert {event["event"] for event in events} == {"draft", "verify"}
    assert all(event["running"] == 1 for event in events)


def test_a_request_that_ends_while_others_guess_leaves_nothing_behind() -> None:
    world = World(0.9, 1e-3)

    def gone() -> None:
        raise ConnectionError

    with world.pace.request(["lookup"], Reach(8, 0), None, PROMPT, 10) as request:
        request.plan(PROMPT, 10)
        meet, world.pace.meet = world.pace.meet, gone
        with pytest.raises(ConnectionError):
            request.settle(Proposal.chain([1] * 8, "lookup"))
    world.pace.meet = meet
    assert world.rounds(50).gain > 1


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(1.0, seed=4)], ids=["greedy", "sampled"])
def test_output_is_that_of_plain_decoding_however_it_decides(heads_runner: Runner, sampling: Sampling) -> None:
    request = Request(heads_runner.encode("the sun rose over the sea and the sun"), max_tokens=80, sampling=sampling)
    plain = heads_runner.generate(request.plain()).ids
    for _ in range(3):
        assert heads_runner.generate(request).ids == plain
    assert heads_runner.generate(dataclasses.replace(request, k=3)).ids == plain
