"""How far rounds speculate: what calls cost, what is accepted, and that speculation comes back when it pays again."""

import dataclasses

import numpy as np
import pytest

from specrun.engines.manifest import TARGET
from specrun.runner.logits import ACCEPT, GUESS
from specrun.runner.pace import NOWHERE, CallCosts, DraftCost, Pace, Reach, RequestPace
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.types import EMPTY, Proposal

STEP, ROW = 20e-3, 1e-3  # seconds of the pretended target


def test_costs_are_a_line_through_rows() -> None:
    costs = CallCosts()
    assert costs.predict(TARGET, 3) is None
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows = int(rng.integers(1, 20))
        costs.observe(TARGET, rows, STEP + ROW * rows)
    for rows in (1, 5, 17, 40):
        assert costs.predict(TARGET, rows) == pytest.approx(STEP + ROW * rows, rel=1e-6)


def test_one_width_alone_predicts_itself() -> None:
    costs = CallCosts()
    for _ in range(5):
        costs.observe(TARGET, 4, 0.03)
    assert costs.predict(TARGET, 4) == costs.predict(TARGET, 9) == pytest.approx(0.03)


class World:
    """A draft that hits with a rate, on a machine where a draft's call takes `draft_seconds`."""

    def __init__(self, rate: float, draft_seconds: float) -> None:
        self.rate, self.draft_seconds = rate, draft_seconds
        self.costs = CallCosts()
        for rows in (1, 2, 5, 9, 17):
            self.costs.observe(TARGET, rows, STEP + ROW * rows)
            self.costs.observe("eagle3", rows, draft_seconds)
            self.costs.observe(ACCEPT, rows, 1e-4 * rows)
            self.costs.observe(GUESS, rows, 1e-4 * rows)
        self.rng = np.random.default_rng(1)
        self.pace = Pace(self.costs)

    def round(self, request: RequestPace) -> None:
        reach = request.plan()
        draft = request.next.draft
        guesses = Proposal.chain([1] * draft) if draft else EMPTY
        hits = 0
        while hits < draft and self.rng.random() < self.rate:
            hits += 1
        seconds = STEP + ROW * (1 + (0 if request.probing else draft)) + draft * self.draft_seconds
        request.learn(guesses, min(hits, 1) if request.probing else hits, seconds)
        assert reach == draft

    def rounds(self, count: int) -> dict[Reach, int]:
        self.pace.decisions.clear()
        with self.pace.request(["draft"], Reach(0, 4), DraftCost("eagle3", per_position=True, breadth=1)) as request:
            for _ in range(count):
                self.round(request)
        return self.pace.decisions


def share_of_speculation(decisions: dict[Reach, int]) -> float:
    return 1 - decisions.get(NOWHERE, 0) / sum(decisions.values())


def test_a_good_cheap_draft_is_used_and_reaches_far() -> None:
    decisions = World(rate=0.9, draft_seconds=1e-3).rounds(2000)
    assert share_of_speculation(decisions) > 0.9
    assert max(decisions, key=lambda reach: decisions[reach]).draft >= 3


def test_a_draft_that_never_hits_is_given_up() -> None:
    assert share_of_speculation(World(rate=0.02, draft_seconds=3e-3).rounds(4000)) < 0.1


def test_a_draft_as_slow_as_the_target_is_given_up() -> None:
    assert share_of_speculation(World(rate=0.5, draft_seconds=20e-3).rounds(4000)) < 0.1


def test_speculation_goes_off_and_comes_back() -> None:
    world = World(rate=0.02, draft_seconds=1e-3)
    world.rounds(3000)
    world.rate = 0.95
    assert share_of_speculation(world.rounds(20_000)) > 0.5
    world.rate = 0.0
    world.rounds(3000)
    assert share_of_speculation(world.rounds(3000)) < 0.2


def test_finding_out_costs_little() -> None:
    """Where speculation does not pay: time against plain decoding, as the pretended machine counts it."""
    world = World(rate=0.1, draft_seconds=5e-3)
    world.rounds(500)
    seconds, tokens = 0.0, 0
    with world.pace.request(["draft"], Reach(0, 4), DraftCost("eagle3", per_position=True, breadth=1)) as request:
        for _ in range(5000):
            draft = request.plan() and request.next.draft
            hits = 0
            while hits < draft and world.rng.random() < world.rate:
                hits += 1
            took = STEP + ROW * (1 + (0 if request.probing else draft)) + draft * world.draft_seconds
            accepted = min(hits, 1) if request.probing else hits
            request.learn(Proposal.chain([1] * draft) if draft else EMPTY, accepted, took)
            seconds, tokens = seconds + took, tokens + 1 + (0 if request.probing else accepted)
    assert tokens / seconds > 0.97 / (STEP + ROW)


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(1.0, seed=4)], ids=["greedy", "sampled"])
def test_output_is_that_of_plain_decoding_however_it_decides(heads_runner: Runner, sampling: Sampling) -> None:
    request = Request(heads_runner.encode("the sun rose over the sea and the sun"), max_tokens=80, sampling=sampling)
    plain = heads_runner.generate(request.plain()).ids
    for _ in range(3):
        assert heads_runner.generate(request).ids == plain
    assert heads_runner.generate(dataclasses.replace(request, k=3)).ids == plain
