"""The buffers of the KV cache: steps of growth, a small start for each sequence, the capacity."""

import numpy as np
import pytest

from specrun.engines.signature import Signature
from specrun.runner.kv_cache import CapacityError, KVCache


def rows(cache: KVCache) -> int:
    return int(next(iter(cache.buffers()))[2].shape()[2])


def test_buffers_grow_in_steps_keep_their_rows_and_start_small_again() -> None:
    cache = KVCache(Signature(num_layers=1, kv_heads=2, head_dim=4, vocab_size=8), "float32", capacity=1_000)
    assert not cache.reserve(256)
    committed = np.random.default_rng(0).random((1, 2, 200, 4)).astype(np.float32)
    for _, _, buffer in cache.buffers():
        buffer.numpy()[:, :, :200] = committed  # shares memory with the cache
    cache.truncate(200)
    assert cache.reserve(257)
    assert rows(cache) == 512
    for _, _, buffer in cache.buffers():
        assert np.array_equal(buffer.numpy()[:, :, :200], committed)
        assert not buffer.numpy()[:, :, 200:].any()
    assert cache.reserve(600)
    assert rows(cache) == 1_000
    assert not cache.reserve(10)  # within a sequence it never shrinks
    cache.truncate(0)
    assert cache.reserve(10)
    assert rows(cache) == 256


def test_more_than_the_capacity_is_refused() -> None:
    cache = KVCache(Signature(num_layers=1, kv_heads=1, head_dim=4, vocab_size=8), "float16", capacity=100)
    assert rows(cache) == 100
    with pytest.raises(CapacityError, match="got 101 tokens, the KV cache holds 100"):
        cache.reserve(101)
