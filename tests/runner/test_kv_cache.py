"""The buffers of the KV cache: steps of growth, a small start for each sequence, accepted paths, the capacity."""

from typing import Any

import numpy as np
import pytest

from specrun.engines.signature import Signature
from specrun.runner.kv_cache import CapacityError, KVCache

SIGNATURE = Signature(num_layers=1, kv_heads=2, head_dim=4, vocab_size=8, hidden_size=8)


def arrays(cache: KVCache) -> list[np.ndarray[Any, Any]]:
    """The buffers; they share memory with the cache."""
    return [buffer.numpy() for _, _, buffer in cache.buffers(SIGNATURE)]


def rows(cache: KVCache) -> int:
    return int(arrays(cache)[0].shape[2])


def test_buffers_grow_in_steps_keep_their_rows_and_start_small_again() -> None:
    cache = KVCache(SIGNATURE, "float32", capacity=1_000)
    cache.reserve(0, 256)
    assert (rows(cache), cache.version) == (256, 0)
    committed = np.random.default_rng(0).random((1, 2, 200, 4)).astype(np.float32)
    for array in arrays(cache):
        array[:, :, :200] = committed
    cache.reserve(200, 257)
    assert (rows(cache), cache.version) == (512, 1)
    for array in arrays(cache):
        assert np.array_equal(array[:, :, :200], committed)
        assert not array[:, :, 200:].any()
    cache.reserve(257, 600)
    assert rows(cache) == 1_000
    cache.reserve(1, 10)  # within a sequence it never shrinks
    assert rows(cache) == 1_000
    cache.reserve(0, 10)
    assert (rows(cache), cache.version) == (256, 3)


@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 2], [1, 3, 4], [4]])
def test_rows_of_an_accepted_path_are_moved_together(path: list[int]) -> None:
    cache = KVCache(SIGNATURE, "float32", capacity=100)
    before = np.random.default_rng(0).random((1, 2, 100, 4)).astype(np.float32)
    for array in arrays(cache):
        array[:] = before
    cache.gather(10, path)
    for array in arrays(cache):
        assert np.array_equal(array[:, :, :10], before[:, :, :10])
        assert np.array_equal(array[:, :, 10 : 10 + len(path)], before[:, :, [10 + node for node in path]])


def test_more_than_the_capacity_is_refused() -> None:
    cache = KVCache(SIGNATURE, "float16", capacity=100)
    assert rows(cache) == 100
    with pytest.raises(CapacityError, match="got 101 tokens, the KV cache holds 100"):
        cache.require(101)
