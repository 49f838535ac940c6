"""How a token is chosen from a row of logits. The one place that says so, for target and draft alike.

Order: temperature, then top-k, then top-p over what is left, then min-p; then the arg-max of the remaining
scores plus the position's noise. Ties: every filter keeps all tokens that equal its last one; of equal final
scores the lowest id wins. Temperature 0 is the arg-max of the logits, without filters or noise.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.engines.errors import SpecrunError
from specrun.runner import noise

Array = np.ndarray[Any, Any]

# Nucleus search looks at so many of the best tokens before it looks at all: enough for most rows.
FIRST_LOOK = 512
# Without filters, tokens this close to the best are scored exactly; the rest only where their noise is large.
NEAR_BEST = 6.0


class RequestError(SpecrunError):
    """A generation request makes no sense."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request. Zero switches top_k and min_p off, one switches top_p off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one is drawn, and reported with the result

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise RequestError(f"got temperature {self.temperature}, expected 0 (greedy) or more")
        if self.top_k < 0:
            raise RequestError(f"got top-k {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"got top-p {self.top_p}, expected more than 0 and at most 1 (off)")
        if not 0 <= self.min_p < 1:
            raise RequestError(f"got min-p {self.min_p}, expected 0 (off) to less than 1")
        if self.seed is not None and not 0 <= self.seed <= noise.MAX_SEED:
            raise RequestError(f"got seed {self.seed}, expected 0 to {noise.MAX_SEED}")

    def with_seed(self) -> "Sampling":
        """The same with a seed."""
        if self.seed is not None:
            return self
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, secrets.randbits(63))


class LogitsError(SpecrunError):
    """A model returned logits that no token can be chosen from."""


class Chooser:
    """Makes the choices of one request: a pure function of logits, seed and position."""

    def __init__(self, sampling: Sampling) -> None:
        if sampling.seed is None:
            raise AssertionError("a chooser needs a seed; see Sampling.with_seed")
        self.sampling = sampling
        self.seed = sampling.seed

    def choose(self, logits: Array, position: int) -> int:
        """The token at `position` of the sequence, given its logits [vocabulary]. Raises LogitsError."""
        best = int(logits.argmax())
        top = float(logits[best])
        if not np.isfinite(top):
            raise LogitsError(f"the largest logit at position {position} is {top}, expected a number")
        if self.sampling.temperature == 0:
            return best
        scores = self._scores(logits)
        words = noise.words(self.seed, position, len(scores))
        kept = self._filter(scores)
        if kept is None:
            kept = _contenders(scores, words)
        noisy = scores[kept].astype(np.float64) + noise.gumbel(words[kept])
        return int(kept[noisy.argmax()])

    def best(self, logits: Array, position: int, count: int, ids: Array | None = None) -> tuple[Array, Array]:
        """The `count` tokens that a draft finds most likely to be the choice at `position`, best first.

        `logits` are a draft's: of the token ids `ids`, ascending, or of the whole vocabulary. Returns token ids
        and the logarithms of the shares that a softmax over score plus noise gives them: how sure the draft is,
        the noise known. Fewer than `count` where the filters leave fewer. The first is what `choose` would return.
        """
        noisy = self._draft_scores(logits, position, ids)
        if count == 1:
            columns = np.array([noisy.argmax()])
        else:
            count = min(count, len(noisy))
            columns = np.flatnonzero(noisy >= np.partition(noisy, -count)[-count])
            columns = columns[np.argsort(-noisy[columns], kind="stable")][:count]
            columns = columns[np.isfinite(noisy[columns])]
        top = noisy[columns]
        shares = top - top[0] - np.log(np.exp(noisy - top[0]).sum())
        return columns if ids is None else ids[columns], shares

    def _draft_scores(self, logits: Array, position: int, ids: Array | None) -> Array:
        if self.sampling.temperature == 0:
            return logits
        scores = self._scores(logits)
        if ids is None:
            words = noise.words(self.seed, position, len(scores))
        else:
            words = noise.words(self.seed, position, int(ids[-1]) + 1)[ids]
        noisy = scores.astype(np.float64) + noise.gumbel(words)
        kept = self._filter(scores)
        if kept is not None:
            out = np.ones(len(scores), bool)
            out[kept] = False
            noisy[out] = -np.inf
        return noisy

    def noisy_scores(self, logits: Array, position: int) -> Array:
        """Score plus noise of every token, -inf where filtered out: float64 [vocabulary].

        `choose` returns its arg-max without computing all of it; this is for explanations and tests.
        """
        if self.sampling.temperature == 0:
            return logits.astype(np.float64)
        scores = self._scores(logits)
        kept = self._filter(scores)
        noisy = scores.astype(np.float64) + noise.gumbel(noise.words(self.seed, position, len(scores)))
        return noisy if kept is None else np.where(np.isin(np.arange(len(scores)), kept), noisy, -np.inf)

    def _scores(self, logits: Array) -> Array:
        """Logits over temperature, the best at 0: float32 [vocabulary]."""
        with np.errstate(over="ignore"):  # tiny temperatures send all but the best to -inf, rightly
            return np.asarray((logits - logits.max()) / np.float32(self.sampling.temperature), np.float32)

    def _filter(self, scores: Array) -> Array | None:
        """Ids that top-k, top-p and min-p leave, ascending; None where no filter is on."""
        top_k, top_p, min_p = self.sampling.top_k, self.sampling.top_p, self.sampling.min_p
        if not (0 < top_k < len(scores)) and top_p == 1 and min_p == 0:
            return None
        threshold = float("-inf")
        if 0 < top_k < len(scores):
            threshold = float(np.partition(scores, -top_k)[-top_k])
        if top_p < 1:
            threshold = max(threshold, _nucleus_threshold(scores[scores >= threshold], top_p))
        if min_p > 0:
            threshold = max(threshold, float(np.log(min_p)))  # the best token's score is 0
        return np.flatnonzero(scores >= threshold)


def _nucleus_threshold(scores: Array, top_p: float) -> float:
    """The score of the last token in the smallest set of best tokens that holds `top_p` of the mass."""
    needed = top_p * float(np.exp(scores).sum(dtype=np.float64))
    for look in (FIRST_LOOK, len(scores)):
        best = scores if look >= len(scores) else np.partition(scores, -look)[-look:]
        best = np.sort(best)[::-1]
        mass = np.exp(best).cumsum(dtype=np.float64)
        last = int(np.searchsorted(mass, needed))
        if last < len(best):
            return float(best[last])
    return float(best[-1])  # rounding: the sum in this order fell just short of the other


def _contenders(scores: Array, words: Array) -> Array:
    """Ids, ascending, that can win over all others once noise is added; exact, without noise for most.

    The best of the near tokens sets a bar. A token further off passes it only with noise above
    bar - (-NEAR_BEST), which its word tells without a logarithm.
    """
    near = scores > -NEAR_BEST
    bar = float((scores[near].astype(np.float64) + noise.gumbel(words[near])).max())
    lucky = words >= noise.smallest_word_above(bar + NEAR_BEST)
    return np.flatnonzero(near | lucky)
