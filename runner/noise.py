"""The noise of the accept rule: a standard Gumbel number for each (seed, position, token id).

With G drawn independently per token id, `argmax(log p + G)` is an exact sample of p. Because G is a pure
function of (seed, position, token id), plain decoding, a draft and the verification of its proposal all meet
the same noise; see the accept rule in ARCHITECTURE.md.

The generator is Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), in
NumPy's compiled form. One 32-bit word belongs to each token id: key = (seed, 0),
counter = (1 + id // 8, position, 0, STREAM), word id % 8 of the 256-bit block, counted from its low end.
The rejection rule draws from streams of its own.
"""

from typing import Any

import numpy as np

from specrun.runner.arithmetic import LN_2, SQRT_HALF_BITS, log, twice_atanh

Array = np.ndarray[Any, Any]

STREAM = 0x5350_4543  # keeps these counters apart from other uses of the same seed
DRAFT_STREAM, REJECTION_STREAM = STREAM + 1, STREAM + 2
WORDS_PER_BLOCK = 8
WORD_RANGE = 2.0**32
MAX_SEED = 2**64 - 1

# From this word on, -log(uniform) is computed from the distance to 1: (1 - sqrt(1/2)) / 2**32 further down.
NEAR_ONE = 0xB504F334
BOUND_MARGIN = 1e-3  # far more than the rounding of `gumbel`


def words(seed: int, position: int, count: int, stream: int = STREAM) -> Array:
    """The random words of token ids 0 .. count - 1 at a position of the sequence: uint32 [count]."""
    blocks = -(-count // WORDS_PER_BLOCK)
    # NumPy advances the counter before it generates, so the first block has counter 1.
    generator = np.random.Philox(
        counter=np.array([0, position, 0, stream], np.uint64), key=np.array([seed, 0], np.uint64)
    )
    raw: Array = generator.random_raw(blocks * WORDS_PER_BLOCK // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:count]


def gumbel(word: Array) -> Array:
    """Standard Gumbel numbers -log(-log((word + 1/2) / 2**32)): float32, increasing in the word up to rounding."""
    near_one = word >= NEAR_ONE
    distance = np.where(near_one, ~word, word).astype(np.float32)  # from the nearer end
    distance += np.float32(0.5)
    distance *= np.float32(1 / WORD_RANGE)
    # Logarithms of both as in `arithmetic.log`, with one division: log(1 - d) = -2 atanh(d / (2 - d)).
    offset = distance.view(np.int32) - SQRT_HALF_BITS
    mantissa = ((offset & 0x7FFFFF) + SQRT_HALF_BITS).view(np.float32)
    numerator = np.where(near_one, distance, np.float32(1) - mantissa)
    denominator = np.where(near_one, np.float32(2) - distance, mantissa + np.float32(1))
    exponential = twice_atanh(numerator / denominator)
    exponential -= np.where(near_one, 0, offset >> 23).astype(np.float32) * LN_2
    return np.asarray(-log(exponential))


def smallest_word_above(score: float) -> int:
    """A word below which `gumbel` is less than `score`: lets most tokens be dismissed without a logarithm."""
    uniform = np.exp(-np.exp(BOUND_MARGIN - score))
    return max(0, int(uniform * WORD_RANGE) - 2)
