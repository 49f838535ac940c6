"""How a token is chosen from a row of logits: the specification, for target and draft, NumPy and CUDA alike.

A row goes through these steps, in this order. NumPy (this module and the ones named) is the reference, the kernels in
`engines/accept.cu` give the same bits on the same logits.

1. **Logits** are taken as float32, padding ids cut off.
2. **Processors** (`processors.py`): logit bias, repetition, frequency and presence penalty, then masks (allowed and
   forbidden tokens, stop tokens before min-tokens, grammar), which set a logit to -inf.
3. **Validity** (`filters.py`): if a logit is NaN or +inf, or all are -inf, there is no choice: LogitsError, once that
   row is reached. A masked NaN does not count.
4. **Temperature** 0 is the arg-max of the processed logits; nothing of the following applies. Otherwise score =
   (logit - largest logit) * (1 / temperature), in this order of operations.
5. **Filters** (`filters.py`): top-k, top-p over what is left, min-p; each keeps all tokens that equal its last one.
6. **Noise** (`noise.py`): the choice is the arg-max of score + Gumbel number of (seed, position, token id).

Of equal values the lowest token id wins, everywhere. All arithmetic is single precision without fused operations,
with the logarithm and exponential of `arithmetic.py`; probability mass is counted in integers.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from specrun.engines.errors import RequestError
from specrun.runner import noise
from specrun.runner.arithmetic import MASS_BITS, mass
from specrun.runner.filters import FLOAT32, Policy, Summary, masses, scores, summarize
from specrun.runner.processors import Processing, Processor

Array = np.ndarray[Any, Any]
AcceptRule = Literal["coupled", "rejection"]

# Without filters, tokens this close to the best are scored exactly; the rest only where their noise is large.
NEAR_BEST = 6.0


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request. Zero switches top_k and min_p off, one switches top_p off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one is drawn, and reported with the result
    accept: AcceptRule = "coupled"  # rejection: the same distribution, other tokens than plain decoding

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and np.isfinite(self.temperature)):
            raise RequestError(f"got temperature {self.temperature}, expected 0 (greedy) or more")
        if self.top_k < 0:
            raise RequestError(f"got top-k {self.top_k}, expected 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"got top-p {self.top_p}, expected more than 0 and at most 1 (off)")
        if not 0 <= self.min_p < 1:
            raise RequestError(f"got min-p {self.min_p}, expected 0 (off) to less than 1")
        if self.accept not in ("coupled", "rejection"):
            raise RequestError(f"got accept rule {self.accept!r}, expected coupled or rejection")
        if self.seed is not None and not 0 <= self.seed <= noise.MAX_SEED:
            raise RequestError(f"got seed {self.seed}, expected 0 to {noise.MAX_SEED}")

    def with_seed(self) -> "Sampling":
        """The same with a seed."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))

    @property
    def policy(self) -> Policy:
        return Policy.of(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def rejects(self) -> bool:
        """Whether the rejection rule judges. At temperature 0 both rules are the same."""
        return self.accept == "rejection" and self.temperature > 0


@dataclass(frozen=True)
class Guesses:
    """What a draft would choose at a position, best first."""

    tokens: Array  # ids [count]
    shares: Array  # logarithms of how sure the draft is of each, float64 [count]
    probs: Array | None  # float32 [vocabulary]: what the token was drawn from, where the rejection rule needs it


NO_GUESSES = Guesses(np.empty(0, np.int64), np.empty(0), None)


class Chooser:
    """Makes the choices of one request: a pure function of logits, seed, position and the tokens before it.

    `path`: the tokens between the committed ones and the position, which processors must know of.
    """

    def __init__(self, sampling: Sampling, processor: Processor | None = None) -> None:
        if sampling.seed is None:
            raise AssertionError("a chooser needs a seed; see Sampling.with_seed")
        self.sampling = sampling
        self.seed = sampling.seed
        self.policy = sampling.policy
        self.processor = processor

    @property
    def processing(self) -> Processing:
        return Processing() if self.processor is None else self.processor.processing

    def commit(self, token: int) -> None:
        """`token` was emitted: it is part of what processors look back on."""
        if self.processor is not None:
            self.processor.commit(token)

    def choose(self, logits: Array, position: int, path: Sequence[int] = ()) -> int:
        """The token at `position` of the sequence, given its logits float32 [vocabulary]. Raises LogitsError."""
        row, summary = self._read(logits, position, path)
        if self.policy.greedy:
            return summary.best
        if self.policy.filters:
            kept = np.flatnonzero(row >= summary.threshold)
            if len(kept) == 1:
                return int(kept[0])
            words = noise.words(self.seed, position, int(kept[-1]) + 1)
            noisy = scores(row[kept], summary.top, self.policy)
        else:
            words = noise.words(self.seed, position, len(row))
            noisy = scores(row, summary.top, self.policy)
            kept = _contenders(noisy, words)
            noisy = noisy[kept]
        noisy += noise.gumbel(words[kept])
        return int(kept[noisy.argmax()])

    def best(
        self, logits: Array, position: int, count: int, ids: Array | None = None, path: Sequence[int] | None = ()
    ) -> Guesses:
        """The `count` tokens that a draft finds most likely to be the choice at `position`.

        `logits` are a draft's: of the token ids `ids`, ascending, or of the whole vocabulary. A share is what a
        softmax over score plus noise gives a token: how sure the draft is, the noise known. Fewer than `count` where
        the filters leave fewer, none where the processors leave none. The first is what `choose` would return. `path`:
        None if the tokens in between are not known.

        Under the rejection rule it is one token, drawn with noise of the draft's own; its share is the best token's,
        so that whether it is proposed does not hang on which one was drawn: that would bias the output.
        """
        if self.processor is not None:
            if not self.processor.may_continue(path):
                return NO_GUESSES
            logits = self.processor.process(logits, path, ids)
            if logits.max() == -np.inf:  # no token that the draft knows is allowed
                return NO_GUESSES
        row, summary = logits, summarize(logits, self.policy, f"the draft's guess for position {position}")
        if self.sampling.rejects:
            return self._draw(row, summary, position, ids)
        noisy = self._noisy(row, summary, position, ids, noise.STREAM)
        if count == 1:
            columns = np.array([noisy.argmax()])
        else:
            count = min(count, len(noisy))
            columns = np.flatnonzero(noisy >= np.partition(noisy, -count)[-count])
            columns = columns[np.argsort(-noisy[columns], kind="stable")][:count]
            columns = columns[np.isfinite(noisy[columns])]
        top = noisy[columns[0]]
        with np.errstate(over="ignore"):
            total = mass(noisy - top).sum()
        shares = (noisy[columns] - top).astype(np.float64) - np.log(total / 2.0**MASS_BITS)
        return Guesses(columns if ids is None else ids[columns], shares, None)

    def probabilities(self, logits: Array, position: int, path: Sequence[int] = ()) -> tuple[Array, Array]:
        """The distribution after processors and filters: float32 [vocabulary], and the mass behind it."""
        row, summary = self._read(logits, position, path)
        mass_of = masses(row, summary, self.policy)
        return probabilities(mass_of), mass_of

    def noisy_scores(self, logits: Array, position: int, path: Sequence[int] = ()) -> Array:
        """Score plus noise of every token, -inf where filtered out: float32 [vocabulary].

        `choose` returns its arg-max without computing all of it; this is for explanations and tests.
        """
        row, summary = self._read(logits, position, path)
        return self._noisy(row, summary, position, None, noise.STREAM)

    def _read(self, logits: Array, position: int, path: Sequence[int]) -> tuple[Array, Summary]:
        row = logits if self.processor is None else self.processor.process(logits, path)
        return row, summarize(row, self.policy, f"position {position}")

    def _noisy(self, row: Array, summary: Summary, position: int, ids: Array | None, stream: int) -> Array:
        if self.policy.greedy:
            return row
        kept = np.flatnonzero(row >= summary.threshold)
        of = kept if ids is None else ids[kept]
        words = noise.words(self.seed, position, int(of[-1]) + 1, stream)
        noisy = np.full(len(row), -np.inf, np.float32)
        noisy[kept] = scores(row[kept], summary.top, self.policy) + noise.gumbel(words[of])
        return noisy

    def _draw(self, row: Array, summary: Summary, position: int, ids: Array | None) -> Guesses:
        drawn = self._noisy(row, summary, position, ids, noise.DRAFT_STREAM).argmax()
        probs = probabilities(masses(row, summary, self.policy))
        share = np.log(probs.max(keepdims=True).astype(np.float64))
        if ids is not None:
            whole = np.zeros(int(ids[-1]) + 1, np.float32)
            whole[ids] = probs
            probs, drawn = whole, ids[drawn]
        return Guesses(np.array([drawn]), share, probs)


def probabilities(mass_of: Array) -> Array:
    """Masses as shares of their sum: float32."""
    return np.asarray(mass_of.astype(np.float32) * np.float32(1 / float(mass_of.sum())))


def log_probabilities(logits: Array, tokens: Sequence[int]) -> Array:
    """Logarithms of the probabilities that a model gives to `tokens`: of its own logits, before any processor, at
    temperature 1. float64 [tokens]."""
    top = logits.max()
    total = mass(scores(logits, top, Policy.of(1.0, 0, 1.0, 0.0))).sum()
    return np.asarray((logits[list(tokens)] - top).astype(np.float64) - np.log(total / 2.0**MASS_BITS))


def _contenders(row_scores: Array, words: Array) -> Array:
    """Ids, ascending, that can win over all others once noise is added; exact, without noise for most.

    The best of the near tokens sets a bar. A token further off passes it only with noise above
    bar - (-NEAR_BEST), which its word tells without a logarithm.
    """
    near = row_scores > -NEAR_BEST
    bar = float((row_scores[near] + noise.gumbel(words[near])).max())
    lucky = words >= noise.smallest_word_above(bar + NEAR_BEST)
    near |= lucky & (row_scores >= FLOAT32.min)
    return np.flatnonzero(near)
