"""The rejection rule: the target's distribution, though other tokens than plain decoding's."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specrun.engines.errors import RequestError
from specrun.runner import noise, rejection
from specrun.runner.compare import compare
from specrun.runner.draft_tree import CHAIN
from specrun.runner.loop import decode
from specrun.runner.proposers import Proposer
from specrun.runner.proposers.draft_model import DraftModel
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import AcceptRule, Chooser, Sampling
from specrun.runner.statistics import Statistics
from specrun.runner.types import Proposal
from tests.runner.stand_in import TableSession, context_logits
from tests.runner.test_drafts import PROMPT, PROPOSERS
from tests.runner.test_loop import limits
from tests.runner.test_sampling import chi_square, target_probs

Array = np.ndarray[Any, Any]
VOCABULARY, RUNS = 6, 8_000
DISTRIBUTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]


def cached_session(seed: int, sharpness: float = 1.0) -> TableSession:
    logits_of = context_logits(VOCABULARY, seed)
    cache: dict[tuple[int, ...], Array] = {}
    return TableSession(lambda tokens: cache.setdefault(tokens, logits_of(tokens) * sharpness))


class Guess:
    """Proposes the same tokens every time, as a lookup might."""

    def start(self, reused: int = 0) -> None: ...

    def observe(self, hidden: Array | None) -> None: ...

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        return Proposal.chain([0, 1, 2, 3][:limit])


DRAFTS: dict[str, Callable[[], Proposer]] = {
    "unlike the target": lambda: DraftModel(cached_session(77), 3),
    "sharper than the target": lambda: DraftModel(cached_session(5, 3.0), 3),
    "flatter than the target": lambda: DraftModel(cached_session(5, 0.3), 3),
    "unsure, held back": lambda: DraftModel(cached_session(77), 3, dataclasses.replace(CHAIN, p_min=0.35)),
    "deterministic": Guess,
}


def pair_counts(proposer: Proposer | None, settings: dict[str, Any], target: TableSession) -> tuple[Array, Statistics]:
    """How often each pair of first two tokens came, [VOCABULARY ** 2]."""
    counts: Counter[tuple[int, ...]] = Counter()
    statistics = Statistics()
    for seed in range(RUNS):
        chooser = Chooser(Sampling(**settings, seed=seed, accept="rejection"))
        tokens = decode(target, proposer, [2], chooser, limits(max_tokens=2, k=3), statistics)
        counts[tuple(token.id for token in tokens)] += 1
    return np.array([counts[pair] for pair in np.ndindex(VOCABULARY, VOCABULARY)]), statistics


def expected_pairs(settings: dict[str, Any], target: TableSession) -> Array:
    logits_of = context_logits(VOCABULARY, 5)
    first = target_probs(logits_of((2,)), **settings)
    return np.concatenate(
        [first[token] * target_probs(logits_of((2, token)), **settings) for token in range(VOCABULARY)]
    )


@pytest.mark.parametrize("settings", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("name", [*DRAFTS, "none"])
def test_tokens_over_seeds_follow_the_target(name: str, settings: dict[str, Any]) -> None:
    """Known faults 9, 10, 11 and 23."""
    target = cached_session(5)
    proposer = None if name == "none" else DRAFTS[name]()
    counts, statistics = pair_counts(proposer, settings, target)
    assert chi_square(counts, expected_pairs(settings, target)) > 1e-4
    wrong = {**settings, "temperature": settings["temperature"] * 1.2}
    assert chi_square(counts, expected_pairs(wrong, target)) < 1e-4
    if proposer is not None:
        assert 0 < statistics.accepted_at.total() < statistics.proposed_at.total()


@pytest.mark.parametrize("fault", ["draft_probs", "shared noise"])
def test_known_mistakes_are_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known faults 9 and 10: recorded probabilities that are not those drawn from; the draft's noise used again."""
    if fault == "draft_probs":
        real = rejection._draft_probs

        def recorded(proposal: Proposal, index: int, vocabulary_size: int) -> Array:
            probs = real(proposal, index, vocabulary_size) ** 0.5
            return np.asarray(probs / probs.sum(), np.float32)

        monkeypatch.setattr(rejection, "_draft_probs", recorded)
    else:
        monkeypatch.setattr(noise, "REJECTION_STREAM", noise.DRAFT_STREAM)
    target = cached_session(5)
    counts, _ = pair_counts(DRAFTS["unlike the target"](), DISTRIBUTIONS[0], target)
    assert chi_square(counts, expected_pairs(DISTRIBUTIONS[0], target)) < 1e-4


def test_it_accepts_more_than_shared_noise_does() -> None:
    accepted = {}
    rules: tuple[AcceptRule, ...] = ("coupled", "rejection")
    for rule in rules:
        statistics = Statistics()
        for seed in range(300):
            chooser = Chooser(Sampling(1.0, seed=seed, accept=rule))
            draft = DraftModel(cached_session(5, 0.6), 3)
            list(decode(cached_session(5), draft, [2], chooser, limits(max_tokens=20, k=3), statistics))
        accepted[rule] = statistics.acceptance_length
    assert accepted["rejection"] > accepted["coupled"] + 0.02


@pytest.mark.parametrize("proposer", ["none", "ngram", *(name for name in PROPOSERS if not name.endswith("_tree"))])
def test_every_chain_runs_and_the_seed_decides(proposer: str, heads_runner: Runner) -> None:
    """Known fault 12, with processors and grammar-free filters on engines."""
    request = Request(PROMPT, max_tokens=40, sampling=Sampling(1.0, top_p=0.9, seed=5, accept="rejection"))
    request = dataclasses.replace(request, proposer=proposer, k=3)
    first = heads_runner.generate(request)
    assert heads_runner.generate(request).ids == first.ids
    other = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=6))
    assert heads_runner.generate(other).ids != first.ids


def test_a_twin_is_accepted_whole(twin_runner: Runner) -> None:
    """Known fault 3."""
    for k in (1, 4, 8):
        sampling = Sampling(1.0, seed=1, accept="rejection")
        statistics = twin_runner.generate(
            Request(PROMPT, max_tokens=40, sampling=sampling, proposer="draft_model", k=k)
        ).statistics
        assert statistics.proposed_at.total() >= 20
        assert statistics.accepted_at == statistics.proposed_at


def test_temperature_0_is_greedy_under_both_rules(heads_runner: Runner) -> None:
    request = Request(PROMPT, max_tokens=30, sampling=Sampling(accept="rejection"), proposer="eagle3_tree")
    assert heads_runner.generate(request).ids == heads_runner.generate(request.plain()).ids


def test_trees_and_comparisons_are_refused(heads_runner: Runner) -> None:
    request = Request(PROMPT, sampling=Sampling(1.0, accept="rejection"), proposer="eagle3_tree")
    with pytest.raises(RequestError, match="judges chains, not trees"):
        heads_runner.generate(request)
    with pytest.raises(RequestError, match="other tokens"):
        compare(heads_runner, dataclasses.replace(request, proposer="eagle3"), repeats=1)
    # The bundle's default is a tree; its chain takes its place.
    statistics = heads_runner.generate(dataclasses.replace(request, proposer=None)).statistics
    assert statistics.proposed == statistics.proposed_at.total() > 0
