"""The noise of the accept rule: a standard Gumbel number for each (seed, position, token id).

With G drawn independently per token id, `argmax(log p + G)` is an exact sample of p. Because G is a pure
function of (seed, position, token id), plain decoding, a draft and the verification of its proposal all meet
the same noise; see the accept rule in ARCHITECTURE.md.

The generator is Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), in
NumPy's compiled form. One 32-bit word belongs to each token id: key = (seed, 0),
counter = (1 + id // 8, position, 0, STREAM), word id % 8 of the 256-bit block, counted from its low end.
"""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

STREAM = 0x5350_4543  # keeps these counters apart from any later use of the same seed
WORDS_PER_BLOCK = 8
WORD_RANGE = 2.0**32
MAX_SEED = 2**64 - 1


def words(seed: int, position: int, count: int) -> Array:
    """The random words of token ids 0 .. count - 1 at a position of the sequence: uint32 [count]."""
    blocks = -(-count // WORDS_PER_BLOCK)
    # NumPy advances the counter before it generates, so the first block has counter 1.
    generator = np.random.Philox(
        counter=np.array([0, position, 0, STREAM], np.uint64), key=np.array([seed, 0], np.uint64)
    )
    raw: Array = generator.random_raw(blocks * WORDS_PER_BLOCK // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:count]


def gumbel(word: Array) -> Array:
    """Standard Gumbel numbers of random words: float64, increasing in the word."""
    uniform = (word.astype(np.float64) + 0.5) / WORD_RANGE
    return np.asarray(-np.log(-np.log(uniform)))


def smallest_word_above(score: float) -> int:
    """A word below which `gumbel` is less than `score`: lets most tokens be dismissed without a logarithm."""
    uniform = np.exp(-np.exp(-score))
    return max(0, int(uniform * WORD_RANGE) - 2)
