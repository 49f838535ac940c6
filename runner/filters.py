"""Which tokens of a row of logits may be chosen: top-k, top-p and min-p as one threshold on the logit."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.engines.errors import SpecrunError
from specrun.runner.arithmetic import mass

Array = np.ndarray[Any, Any]

FLOAT32 = np.finfo(np.float32)
# Filters look at the tokens this close to the best one, in units of the temperature, before they look at all.
DEPTHS = (6.0, 14.0, np.inf)


class LogitsError(SpecrunError):
    """A model returned logits that no token can be chosen from."""


@dataclass(frozen=True)
class Policy:
    """A request's sampling parameters in the form that the arithmetic wants. Folded once, for NumPy and CUDA alike."""

    greedy: bool
    inverse_temperature: np.float32  # finite and not 0
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p_distance: np.float32  # of the last token's logit from the best one's; -inf: off

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float, min_p: float) -> "Policy":
        with np.errstate(over="ignore"):
            inverse = np.float32(1 / temperature) if temperature > 0 else np.float32(1)
            distance = np.float32(temperature * np.log(min_p)) if min_p > 0 else np.float32(-np.inf)
        return cls(temperature == 0, np.clip(inverse, FLOAT32.tiny, FLOAT32.max), top_k, top_p, distance)

    @property
    def filters(self) -> bool:
        """Whether it takes any token away."""
        return self.top_k > 0 or self.top_p < 1 or bool(np.isfinite(self.min_p_distance))


@dataclass(frozen=True)
class Summary:
    """What a row's choice needs to know of the row as a whole."""

    best: int  # the token with the largest logit, the first of several
    top: np.float32  # that logit
    threshold: np.float32  # tokens whose logit is less may not be chosen; finite, so that masked ones never may


def summarize(logits: Array, policy: Policy, where: str) -> Summary:
    """The best token of processed `logits` float32 [vocabulary], and the threshold of its filters.

    Ties: every filter keeps all tokens that equal its last one. Top-k counts tokens; top-p takes the smallest set of
    best tokens that holds its share of the mass that top-k left; min-p compares with the best token. Raises
    LogitsError if the largest logit is not a finite number; NaN counts as the largest.
    """
    best = int(logits.argmax())
    top = np.float32(logits[best])
    if not np.isfinite(top):
        reason = "no token is left that may be chosen" if top == -np.inf else f"the largest logit is {top}"
        raise LogitsError(f"{where}: {reason}, expected a finite number")
    threshold = FLOAT32.min
    if not policy.greedy and policy.filters:
        with np.errstate(over="ignore"):
            threshold = _threshold(logits, top, policy)
    return Summary(best, top, np.float32(threshold))


def scores(logits: Array, top: np.float32, policy: Policy) -> Array:
    """Logits over temperature, the best at 0: float32, at most 0."""
    with np.errstate(over="ignore"):  # tiny temperatures send all but the best to -inf, rightly
        difference = logits - top
        difference *= policy.inverse_temperature
    return np.asarray(difference)


def masses(logits: Array, summary: Summary, policy: Policy) -> Array:
    """Mass of each token after the filters: int64 [vocabulary]. The best one's is 2**MASS_BITS."""
    if policy.greedy:
        return np.where(np.arange(len(logits)) == summary.best, mass(np.zeros(1, np.float32))[0], 0)
    return np.where(logits >= summary.threshold, mass(scores(logits, summary.top, policy)), 0)


def _threshold(logits: Array, top: np.float32, policy: Policy) -> np.float32:
    threshold = FLOAT32.min
    if 0 < policy.top_k < len(logits):
        threshold = max(threshold, _kth_largest(logits, top, policy))
    if policy.top_p < 1:
        threshold = max(threshold, _nucleus_end(logits[logits >= threshold], top, policy))
    return max(threshold, np.float32(top + policy.min_p_distance))


def _near(logits: Array, top: np.float32, policy: Policy, depth: float) -> Array:
    return np.asarray(logits[logits >= top - np.float32(depth / float(policy.inverse_temperature))])


def _kth_largest(logits: Array, top: np.float32, policy: Policy) -> np.float32:
    values = next(near for depth in DEPTHS if len(near := _near(logits, top, policy, depth)) >= policy.top_k)
    return np.float32(np.partition(values, -policy.top_k)[-policy.top_k])


def _nucleus_end(logits: Array, top: np.float32, policy: Policy) -> np.float32:
    """The last logit of the smallest set of best ones that holds top_p of the mass."""
    total = mass(scores(logits, top, policy)).sum()
    needed = max(1, int(np.ceil(policy.top_p * float(total))))
    for depth in DEPTHS:
        best = np.sort(_near(logits, top, policy, depth))[::-1]
        reached = mass(scores(best, top, policy)).cumsum()
        if reached[-1] >= needed:
            return np.float32(best[np.searchsorted(reached, needed)])
    return FLOAT32.min  # rounding of top_p * total, next to 1, asked for more than there is
