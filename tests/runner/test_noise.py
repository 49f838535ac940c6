"""The noise: Philox as published, Gumbel as it must be distributed."""

import numpy as np
import pytest
from scipy import stats

from specrun.runner import noise

MASK = 2**64 - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 after the paper, with Python integers."""
    counter, key = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & MASK,
            (first >> 64) ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & MASK, (key[1] + 0xBB67AE8584CAA73B) & MASK]
    return counter


def test_reference_has_the_published_answers() -> None:
    """Known answers of Random123."""
    zeros = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox4x64([0, 0, 0, 0], [0, 0]) == zeros
    ones = [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]
    assert philox4x64([MASK] * 4, [MASK] * 2) == ones


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 7), (2**63, 123_456), (MASK, 2**40)])
def test_words_are_the_documented_ones(seed: int, position: int) -> None:
    got = noise.words(seed, position, 100)
    for token_id in (0, 1, 7, 8, 9, 63, 99):
        block = philox4x64([1 + token_id // 8, position, 0, noise.STREAM], [seed, 0])
        word = token_id % 8
        assert got[token_id] == (block[word // 2] >> (32 * (word % 2))) & 0xFFFFFFFF


def test_words_do_not_depend_on_how_many_are_asked_for() -> None:
    assert np.array_equal(noise.words(5, 9, 49_152)[:300], noise.words(5, 9, 300))


def test_gumbel_is_standard_gumbel() -> None:
    sample = noise.gumbel(np.concatenate([noise.words(3, position, 1000) for position in range(50)]))
    assert stats.kstest(sample, "gumbel_r").pvalue > 0.001
    assert stats.kstest(sample, "gumbel_r", args=(0.02, 1)).pvalue < 0.001  # a small shift is noticed


def test_gumbel_is_finite_at_both_ends() -> None:
    ends = noise.gumbel(np.array([0, 2**32 - 1], np.uint32))
    assert np.all(np.isfinite(ends))
    assert ends[0] < -3
    assert ends[1] > 22


@pytest.mark.parametrize("score", [-3.0, 0.0, 1.5, 6.0, 12.0, 20.0, 25.0])
def test_no_word_below_the_bound_passes_the_score(score: float) -> None:
    bound = noise.smallest_word_above(score)
    assert 0 <= bound < 2**32
    if bound > 0:
        assert noise.gumbel(np.array([bound - 1], np.uint32))[0] < score
