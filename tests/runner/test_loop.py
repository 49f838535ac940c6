"""The loop and the acceptor, on stand-in sessions: equality with plain decoding whatever is proposed."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from specrun.runner import logits as logits_module
from specrun.runner.draft_tree import CHAIN, TreeShape
from specrun.runner.loop import Limits, decode
from specrun.runner.proposers import Proposer
from specrun.runner.proposers.draft_model import DraftModel
from specrun.runner.proposers.ngram import NGramLookup
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.session import Session
from specrun.runner.statistics import Statistics
from specrun.runner.types import Proposal, Token, Verdict
from tests.runner.stand_in import TableSession, context_logits
from tests.runner.test_sampling import chi_square, target_probs

VOCABULARY = 12
PROMPT = [3, 1, 4, 1, 5]
SAMPLINGS = [
    Sampling(seed=1),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.0, top_p=0.9, seed=2),
    Sampling(temperature=1.3, top_k=5, min_p=0.05, seed=3),
]
KS = [1, 2, 3, 5, 8]


def limits(**changes: Any) -> Limits:
    return Limits(**{"max_tokens": 40, "stop_token_ids": frozenset(), "k": 4, "prefill_width": 3, **changes})


def run(
    proposer: Proposer | None,
    sampling: Sampling,
    target: Session | None = None,
    prompt: Sequence[int] = PROMPT,
    statistics: Statistics | None = None,
    **changes: Any,
) -> list[Token]:
    session = target or TableSession(context_logits(VOCABULARY, seed=0))
    return list(
        decode(session, proposer, list(prompt), Chooser(sampling), limits(**changes), statistics or Statistics())
    )


def ids(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


class Scripted:
    """Proposes what a function of the true continuation says: forced acceptance and rejection."""

    def __init__(self, truth: list[int], guess: Callable[[list[int]], list[int]]) -> None:
        self._truth = [*PROMPT, *truth]
        self._guess = guess

    def start(self, reused: int = 0) -> None:
        pass

    def observe(self, hidden: np.ndarray[Any, Any] | None) -> None:
        pass

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        return Proposal.chain(self._guess(self._truth[len(tokens) : len(tokens) + limit]))


def wrong(token: int) -> int:
    return (token + 1) % VOCABULARY


SCRIPTS: dict[str, Callable[[list[int]], list[int]]] = {
    "accept all": lambda coming: coming,
    "reject first": lambda coming: [wrong(token) for token in coming[:1]] + coming[1:],
    "reject last": lambda coming: coming[:-1] + [wrong(token) for token in coming[-1:]],
    "reject all": lambda coming: [wrong(token) for token in coming],
    "one at a time": lambda coming: coming[:1],
    "nothing": lambda coming: [],
}


TREES = {"small tree": TreeShape(breadth=2, nodes=4), "wide tree": TreeShape(breadth=4, nodes=14)}


def draft(seed: int, spread: float = 1.5, capacity: int = 10_000, shape: TreeShape = CHAIN) -> DraftModel:
    return DraftModel(TableSession(context_logits(VOCABULARY, seed, spread), capacity), prefill_width=3, shape=shape)


PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "n-gram": NGramLookup,
    "random draft": lambda: draft(seed=99),
    "flat draft": lambda: draft(seed=99, spread=0.01),
    "twin draft": lambda: draft(seed=0),
    "short-sighted draft": lambda: draft(seed=0, capacity=20),
    **{f"random draft, {name}": partial(draft, seed=99, shape=shape) for name, shape in TREES.items()},
    **{f"twin draft, {name}": partial(draft, seed=0, shape=shape) for name, shape in TREES.items()},
    "short-sighted draft, wide tree": lambda: draft(seed=0, capacity=24, shape=TREES["wide tree"]),
}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposer_never_changes_the_output(name: str, k: int, sampling: Sampling) -> None:
    """Known faults 1, 5, 12, 22 and 23."""
    assert ids(run(PROPOSERS[name](), sampling, k=k)) == ids(run(None, sampling))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_forced_proposals_never_change_the_output(script: str, k: int, sampling: Sampling) -> None:
    plain = ids(run(None, sampling))
    statistics = Statistics()
    proposer = Scripted(plain, SCRIPTS[script])
    assert ids(run(proposer, sampling, k=k, statistics=statistics)) == plain
    proposed, accepted = statistics.proposed_at.total(), statistics.accepted_at.total()
    if script in ("accept all", "one at a time"):
        assert accepted == proposed > 0
    elif script in ("reject first", "reject all", "nothing"):
        assert accepted == 0
    else:
        assert accepted == proposed - statistics.proposed_at[0]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", range(1, 9))
def test_twin_draft_is_always_accepted(k: int, sampling: Sampling) -> None:
    """Known fault 3: no hole and no duplicate in the draft's cache after full acceptance."""
    statistics = Statistics()
    tokens = run(draft(seed=0), sampling, k=k, max_tokens=60, statistics=statistics)
    assert statistics.accepted_at == statistics.proposed_at
    assert statistics.rounds == -(-60 // (k + 1))
    assert [token.origin for token in tokens[: k + 1]] == ["drafted"] * k + ["bonus"]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_twin_tree_contains_the_twin_chain(k: int, name: str, sampling: Sampling) -> None:
    """A perfect draft's best path is always the target's, whatever else the tree holds."""
    statistics = Statistics()
    run(draft(seed=0, shape=TREES[name]), sampling, k=k, max_tokens=60, statistics=statistics)
    assert statistics.accepted_at[0] == statistics.proposed_at[0]


def test_tree_is_accepted_more_often_than_its_best_chain() -> None:
    lengths = []
    for shape in (CHAIN, TREES["small tree"], TREES["wide tree"]):
        statistics = Statistics()
        run(draft(seed=99, spread=1.0, shape=shape), SAMPLINGS[1], k=3, max_tokens=400, statistics=statistics)
        lengths.append(statistics.acceptance_length)
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0] + 0.3


def test_accepting_too_much_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality tests can fail: an acceptor that takes any token the target might have chosen is not lossless."""

    def lenient(proposal: Proposal, logits: np.ndarray[Any, Any], chooser: Chooser, position: int) -> Verdict:
        accepted = 0
        for row, token in zip(logits, proposal.tokens, strict=False):
            if row[token] < row.max() - 1.0:
                break
            accepted += 1
        return Verdict(tuple(range(accepted)), chooser.choose(logits[accepted], position + accepted))

    plain = ids(run(None, SAMPLINGS[1]))
    monkeypatch.setattr(logits_module, "accept", lenient)
    assert ids(run(draft(seed=99), SAMPLINGS[1])) != plain


DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]


def first_two_counts(proposer: Callable[[], Proposer], settings: dict[str, Any], runs: int) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    logits_of = context_logits(8, seed=5)
    cache: dict[tuple[int, ...], Any] = {}
    target = TableSession(lambda tokens: cache.setdefault(tokens, logits_of(tokens)))
    for seed in range(runs):
        tokens = decode(
            target,
            proposer(),
            [2],
            Chooser(Sampling(**settings, seed=seed)),
            limits(max_tokens=2, k=3),
            Statistics(),
        )
        counts[tuple(token.id for token in tokens)] += 1
    return counts


def expected_pairs(settings: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Probabilities of the first two tokens, [8 * 8]."""
    logits_of = context_logits(8, seed=5)
    first = target_probs(logits_of((2,)), **settings)
    return np.concatenate([first[token] * target_probs(logits_of((2, token)), **settings) for token in range(8)])


@pytest.mark.parametrize("settings", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("greedy_draft", [False, True])
def test_emitted_tokens_follow_the_target_over_seeds(greedy_draft: bool, settings: dict[str, Any]) -> None:
    """Known faults 9, 10 and 11, with a badly matched draft."""
    logits_of = context_logits(8, seed=77)
    cache: dict[tuple[int, ...], Any] = {}
    session = TableSession(lambda tokens: cache.setdefault(tokens, logits_of(tokens) * (50 if greedy_draft else 1)))
    counts = first_two_counts(lambda: DraftModel(session, 3), settings, runs=6_000)
    observed = np.array([counts[pair] for pair in np.ndindex(8, 8)])
    assert chi_square(observed, expected_pairs(settings)) > 1e-4
    assert chi_square(observed, expected_pairs({**settings, "temperature": settings["temperature"] * 1.15})) < 1e-4


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("room", range(1, 11))
def test_generation_ends_exactly_at_the_context_limit(room: int, k: int) -> None:
    """Known fault 4."""
    capacity = len(PROMPT) + room
    for proposer in (None, NGramLookup(), draft(seed=0), draft(seed=0, capacity=len(PROMPT) + 2)):
        target = TableSession(context_logits(VOCABULARY, seed=0), capacity)
        tokens = run(proposer, SAMPLINGS[0], target, k=k, max_tokens=1_000)
        assert len(tokens) == room
        assert tokens[-1].finish_reason == "length"
        assert [token.finish_reason for token in tokens[:-1]] == [None] * (room - 1)


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_exactly_max_tokens_are_emitted(max_tokens: int) -> None:
    """Known fault 8."""
    statistics = Statistics()
    tokens = run(draft(seed=0), SAMPLINGS[1], max_tokens=max_tokens, statistics=statistics)
    assert len(tokens) == statistics.emitted == max_tokens


@pytest.mark.parametrize("k", KS)
def test_nothing_follows_a_stop_token_inside_a_block(k: int) -> None:
    """Known fault 6."""
    plain = ids(run(None, SAMPLINGS[1]))
    stop = plain[7]
    end = plain.index(stop)
    tokens = run(draft(seed=0), SAMPLINGS[1], k=k, stop_token_ids=frozenset({stop}))
    assert ids(tokens) == plain[: end + 1]
    assert tokens[-1].finish_reason == "stop"


def test_prompt_is_fed_in_chunks_and_a_session_serves_many_requests() -> None:
    target = TableSession(context_logits(VOCABULARY, seed=0))
    first = run(None, SAMPLINGS[1], target, prompt=list(range(10)), max_tokens=5)
    assert target.widths == [3, 3, 3, 1, 1, 1, 1, 1]
    run(draft(seed=0), SAMPLINGS[1], target, prompt=[7] * 20)
    assert run(None, SAMPLINGS[1], target, prompt=list(range(10)), max_tokens=5) == first


def test_statistics_count_positions() -> None:
    statistics = Statistics()
    plain = ids(run(None, SAMPLINGS[0]))
    run(Scripted(plain, SCRIPTS["reject last"]), SAMPLINGS[0], k=4, statistics=statistics)
    assert statistics.acceptance_per_position()[0] == 1.0
    assert statistics.acceptance_per_position()[3] == 0.0
    assert statistics.acceptance_length == statistics.emitted / statistics.rounds
    report = statistics.to_json()
    assert report["tokens"] == 40
    assert report["seconds"]["total"] >= sum(report["seconds"][stage] for stage in ("prefill", "verify", "accept"))
