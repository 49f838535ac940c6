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
    """Calls of any width. Inputs, caches and logits stay in the same buffers from call to call."""

    def __init__(self, engine: Path, model: ModelEntry, capacity: int, vocabulary_size: int) -> None:
        """`vocabulary_size`: logits beyond it are cut off (padding, tokens that a partner model lacks)."""
        self._session = load_engine(engine)
        self._vocabulary_size = vocabulary_size
        self._vocab_size = model.signature.vocab_size
        self._dtype = model.cache_dtype
        self._cache = KVCache(model.signature, model.cache_dtype, capacity)
        self._binding = self._session.io_binding()
        self._bind_cache()
        self._calls: dict[int, _CallBuffers] = {}

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
        call = self._calls.get(width)
        if call is None:
            call = self._calls[width] = _CallBuffers(width, self._vocab_size, self._dtype)
        call.input_ids[0] = tokens
        call.position_ids[0] = np.arange(start, start + width)
        call.cache_length[0] = start
        call.bind(self._binding)
        self._session.run_with_iobinding(self._binding)
        self._cache.truncate(start + width)
        return call.logits[0, :, : self._vocabulary_size].astype(np.float32, copy=False)

    def _bind_cache(self) -> None:
        for layer, part, buffer in self._cache.buffers():
            self._binding.bind_ortvalue_input(past(layer, part), buffer)
            self._binding.bind_ortvalue_output(present(layer, part), buffer)


class _CallBuffers:
    """Inputs and logits of calls of one width; NumPy arrays whose memory ONNX Runtime uses directly."""

    def __init__(self, width: int, vocab_size: int, dtype: str) -> None:
        self.input_ids = np.zeros((1, width), np.int64)
        self.position_ids = np.zeros((1, width), np.int64)
        self.cache_length = np.zeros(1, np.int64)
        self.logits = np.zeros((1, width, vocab_size), dtype)
        chain = np.tril(np.ones((1, width, width), bool))
        self._inputs = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in (
                (INPUT_IDS, self.input_ids),
                (POSITION_IDS, self.position_ids),
                (CACHE_LENGTH, self.cache_length),
                (TREE_MASK, chain),
            )
        }
        self._chain = chain  # keeps the memory alive
        self._output = ort.OrtValue.ortvalue_from_numpy(self.logits)

    def bind(self, binding: ort.IOBinding) -> None:
        for name, value in self._inputs.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(LOGITS, self._output)
