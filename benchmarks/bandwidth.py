"""How fast this machine reads memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

BYTES = 1 << 30  # far more than caches hold


def read_bandwidth(threads: int) -> float:
    """GB/s that `threads` threads read together, each its own part of one array; the median of five passes."""
    parts = np.array_split(np.ones(BYTES // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return BYTES / median(_seconds(pool, parts) for _ in range(5)) / 1e9


def _seconds(pool: ThreadPoolExecutor, parts: list[np.ndarray]) -> float:
    begin = time.perf_counter()
    list(pool.map(np.bitwise_or.reduce, parts))
    return time.perf_counter() - begin
