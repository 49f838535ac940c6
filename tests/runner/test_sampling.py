"""Choosing a token: the filters against an independent reference, the distribution over seeds, the corners."""

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specrun.engines.errors import RequestError
from specrun.runner import noise
from specrun.runner.filters import LogitsError
from specrun.runner.sampling import Chooser, Sampling

Array = np.ndarray[Any, Any]
SETTINGS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product((0.7, 1.0, 2.0), (0, 3), (1.0, 0.8), (0.0, 0.1))
]


def chooser(seed: int = 0, **settings: Any) -> Chooser:
    return Chooser(Sampling(**settings, seed=seed))


def target_probs(
    logits: Array, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """The distribution after the documented filters, by sorting, in double precision."""
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores - scores.max())
    if top_k:
        weights[scores < scores[order[min(top_k, len(order)) - 1]]] = 0
    if top_p < 1:
        mass = np.cumsum(weights[order]) / weights.sum()
        last = order[np.searchsorted(mass, top_p)]
        weights[scores < scores[last]] = 0
    weights[weights < min_p * weights.max()] = 0
    return np.asarray(weights / weights.sum())


def chi_square(counts: Array, probs: Array) -> float:
    """p-value; 0 if a token appeared that must not."""
    if counts[probs == 0].any():
        return 0.0
    possible = probs > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[possible], probs[possible] * counts.sum()).pvalue)


@pytest.mark.parametrize("settings", SETTINGS)
def test_choices_over_positions_follow_the_target(settings: dict[str, Any]) -> None:
    """Known faults 9, 11 and 23."""
    logits = np.random.default_rng(1).normal(0, 1.5, 8).astype(np.float32)
    choose = chooser(seed=11, **settings)
    counts = np.bincount([choose.choose(logits, position) for position in range(20_000)], minlength=8)
    assert chi_square(counts, target_probs(logits, **settings)) > 1e-4


def test_chi_square_notices_another_distribution() -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 8).astype(np.float32)
    choose = chooser(seed=11, temperature=1.0)
    counts = np.bincount([choose.choose(logits, position) for position in range(20_000)], minlength=8)
    assert chi_square(counts, target_probs(logits, temperature=1.1)) < 1e-4
    assert chi_square(counts, target_probs(logits, top_k=7)) < 1e-4
    assert chi_square(counts, target_probs(logits, min_p=0.05)) < 1e-4


@pytest.mark.parametrize("settings", [*SETTINGS, {"temperature": 0.0}, {"temperature": 1e-3}])
def test_choice_is_the_best_noisy_score(settings: dict[str, Any]) -> None:
    """The shortcuts for large vocabularies change nothing."""
    rng = np.random.default_rng(3)
    for position in range(40):
        logits = rng.normal(0, rng.uniform(0.1, 6), 5_000).astype(np.float32)
        choose = chooser(seed=position, **settings)
        assert choose.choose(logits, position) == choose.noisy_scores(logits, position).argmax()


@pytest.mark.parametrize("settings", SETTINGS)
def test_filters_keep_what_the_reference_keeps(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    for position in range(10):
        logits = rng.normal(0, 3, 2_000).astype(np.float32)
        kept = np.isfinite(chooser(**settings).noisy_scores(logits, position))
        assert np.array_equal(kept, target_probs(logits, **settings) > 0)


def test_wide_nucleus_needs_a_second_look() -> None:
    """More tokens in the nucleus than the first look takes."""
    logits = np.random.default_rng(5).normal(0, 0.1, 4_000).astype(np.float32)
    kept = np.isfinite(chooser(temperature=1.0, top_p=0.9).noisy_scores(logits, 0))
    assert kept.sum() > 3_000
    assert np.array_equal(kept, target_probs(logits, top_p=0.9) > 0)


def test_low_top_p_at_high_temperature_stays_in_the_nucleus() -> None:
    """Known fault 11."""
    logits = np.random.default_rng(6).normal(0, 2, 1_000).astype(np.float32)
    nucleus = set(np.flatnonzero(target_probs(logits, temperature=2.0, top_p=0.1)))
    choose = chooser(temperature=2.0, top_p=0.1)
    assert {choose.choose(logits, position) for position in range(2_000)} <= nucleus


@pytest.mark.parametrize("settings", [{"temperature": 1e-6}, {"temperature": 1e-30}, {"temperature": 5.0, "top_k": 1}])
def test_nearly_greedy_settings_are_greedy(settings: dict[str, Any]) -> None:
    """Known fault 21. The best logit leads by a tenth, as far as rounding goes."""
    logits = np.random.default_rng(7).normal(0, 3, 1_000).astype(np.float32)
    logits[123] = logits.max() + 0.1
    choose = chooser(**settings)
    assert {choose.choose(logits, position) for position in range(200)} == {123}


def test_low_temperature_gives_no_nan() -> None:
    """Known fault 21: differences of 1e6 logits at temperature 0.01."""
    logits = np.array([-1e6, 3.0, 1e6, -np.inf], np.float32)
    assert chooser(temperature=0.01).choose(logits, 0) == 2
    assert chooser(temperature=0.01, top_p=0.5, min_p=0.1, top_k=2).choose(logits, 0) == 2


def test_ties_are_kept_by_filters_and_go_to_the_lowest_id_without_noise() -> None:
    logits = np.array([1.0, 2.0, 2.0, 2.0, 0.0], np.float32)
    assert chooser().choose(logits, 0) == 1
    for settings in ({"top_k": 1}, {"top_p": 0.1}):
        kept = np.isfinite(chooser(temperature=1.0, **settings).noisy_scores(logits, 0))
        assert kept.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("logits", [[np.nan, 1.0], [1.0, np.inf], [-np.inf, -np.inf]])
def test_broken_logits_are_an_error(logits: list[float]) -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(LogitsError):
            chooser(temperature=temperature).choose(np.array(logits, np.float32), 0)


def test_seed_and_position_decide() -> None:
    """Known fault 12."""
    logits = np.zeros(1_000, np.float32)
    first = [chooser(seed=1, temperature=1.0).choose(logits, position) for position in range(20)]
    assert first == [chooser(seed=1, temperature=1.0).choose(logits, position) for position in range(20)]
    assert first != [chooser(seed=2, temperature=1.0).choose(logits, position) for position in range(20)]
    assert len(set(first)) > 10


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1},
        {"seed": -1},
        {"seed": noise.MAX_SEED + 1},
    ],
)
def test_senseless_parameters_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="expected"):
        Sampling(**settings)
