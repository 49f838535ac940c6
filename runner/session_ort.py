"""A session on ONNX Runtime, CPU provider."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from specrun.engines.manifest import ModelEntry
from specrun.engines.ort import load_engine
from specrun.engines.signature import (
    CACHE_LENGTH,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    TREE_MASK,
    past,
    present,
)
from specrun.runner.kv_cache import KVCache


class OrtSession:
    """Calls of any width. Caches are updated in place; logits go into one buffer, as wide as the widest call."""

    def __init__(self, engine: Path, model: ModelEntry, capacity: int, vocabulary_size: int) -> None:
        """`vocabulary_size`: logits beyond it are cut off (padding, tokens that a partner model lacks)."""
        self._session = load_engine(engine)
        self._vocabulary_size = vocabulary_size
        self._logits = np.empty((1, 0, model.signature.vocab_size), model.cache_dtype)
        self._cache = KVCache(model.signature, model.cache_dtype, capacity)
        self._binding = self._session.io_binding()
        self._bind_cache()

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._cache.length

    def truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def forward(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        width, start = len(tokens), self._cache.length
        if self._cache.reserve(start + width):
            self._bind_cache()
        inputs = {
            INPUT_IDS: np.array([tokens], np.int64),
            POSITION_IDS: np.arange(start, start + width, dtype=np.int64)[None],
            CACHE_LENGTH: np.array([start], np.int64),
            TREE_MASK: np.tri(width, dtype=bool)[None],
        }
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        logits = self._logits_of(width)
        self._binding.bind_ortvalue_output(LOGITS, ort.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(self._binding)
        self._cache.truncate(start + width)
        return logits[0, :, : self._vocabulary_size].astype(np.float32, copy=False)

    def _logits_of(self, width: int) -> np.ndarray[Any, Any]:
        if self._logits.shape[1] < width:
            self._logits = np.empty((1, width, self._logits.shape[2]), self._logits.dtype)
        return self._logits[:, :width]

    def _bind_cache(self) -> None:
        for layer, part, buffer in self._cache.buffers():
            self._binding.bind_ortvalue_input(past(layer, part), buffer)
            self._binding.bind_ortvalue_output(present(layer, part), buffer)
