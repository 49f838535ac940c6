"""Let the target answer many prompts at once and write down its tokens and hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specrun.distill.corpus import Answer
from specrun.engines.manifest import ENGINE_FILE, ModelEntry
from specrun.engines.ort import load_engine
from specrun.engines.signature import (
    CACHE_LENGTH,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    TREE_MASK,
    past,
    present,
)
from specrun.runner.sampling import Chooser

Array = np.ndarray[Any, Any]

CAPACITY_STEP = 32


@dataclass
class _Row:
    """A conversation in progress."""

    tokens: list[int]
    prompt_length: int
    chooser: Chooser
    hidden: list[Array] = field(default_factory=list)  # of the prompt but its last token, then token by token


class Answerer:
    """Decodes `batch` conversations at a time, each until a token of `stop`."""

    def __init__(self, directory: Path, model: ModelEntry, batch: int, max_answer: int, stop: frozenset[int]) -> None:
        self._engine = load_engine(directory / ENGINE_FILE)
        self._model = model
        self._batch = batch
        self._max_answer = max_answer
        self._stop = stop

    def answer(self, prompts: Sequence[Sequence[int]], choosers: Sequence[Chooser]) -> list[Answer]:
        """The answer to each prompt."""
        rows = [_Row(list(prompt), len(prompt), chooser) for prompt, chooser in zip(prompts, choosers, strict=True)]
        # Prompts of like length together, and no new one before all have ended: attention costs by the capacity of the
        # cache, which is that of the longest row.
        ordered = sorted(rows, key=lambda row: row.prompt_length)
        for start in range(0, len(rows), self._batch):
            self._decode(ordered[start : start + self._batch])
        return [Answer(tuple(row.tokens), row.prompt_length, np.concatenate(row.hidden)) for row in rows]

    def _decode(self, rows: list[_Row]) -> None:
        """Finish all `rows`, side by side."""
        signature = self._model.signature
        shape = (len(rows), signature.kv_heads, 0, signature.head_dim)
        caches = [np.zeros(shape, self._model.cache_dtype) for _ in signature.cache_parts()]
        caches = _with_capacity(caches, max(len(row.tokens) for row in rows))
        for index, row in enumerate(rows):
            twin = next((earlier for earlier in range(index) if rows[earlier].tokens == row.tokens), None)
            if twin is None:
                self._prefill(row, [cache[index : index + 1] for cache in caches])
            else:  # the same prompt was read a moment ago
                row.hidden = rows[twin].hidden[:]
                for cache in caches:
                    cache[index] = cache[twin]
        rows = list(rows)
        while rows:
            caches = _with_capacity(caches, max(len(row.tokens) for row in rows))
            tokens = np.array([row.tokens[-1:] for row in rows], np.int64)
            lengths = np.array([len(row.tokens) - 1 for row in rows], np.int64)
            logits, hidden = self._call(tokens, lengths, [cache[: len(rows)] for cache in caches])
            for index in reversed(range(len(rows))):
                row = rows[index]
                row.hidden.append(hidden[index].astype(np.float16))
                choice = row.chooser.choose(logits[index, -1, : self._model.vocabulary_size], len(row.tokens))
                row.tokens.append(choice)
                if choice in self._stop or len(row.tokens) - row.prompt_length == self._max_answer:
                    last = rows.pop()  # it takes the free place, so that the rest stay dense
                    if last is not row:
                        rows[index] = last
                        for cache in caches:
                            cache[index] = cache[len(rows)]

    def _prefill(self, row: _Row, caches: list[Array]) -> None:
        tokens = np.array([row.tokens], np.int64)
        if tokens.shape[1] > 1:
            _, hidden = self._call(tokens[:, :-1], np.zeros(1, np.int64), caches)
            row.hidden.append(hidden[0].astype(np.float16))

    def _call(self, tokens: Array, lengths: Array, caches: list[Array]) -> tuple[Array, Array]:
        batch, width = tokens.shape
        binding = self._engine.io_binding()
        inputs = {
            INPUT_IDS: tokens,
            POSITION_IDS: lengths[:, None] + np.arange(width),
            CACHE_LENGTH: lengths,
            TREE_MASK: np.repeat(np.tri(width, dtype=bool)[None], batch, 0),
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for part, cache in zip(self._model.signature.cache_parts(), caches, strict=True):
            value = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(past(*part), value)
            binding.bind_ortvalue_output(present(*part), value)
        signature = self._model.signature
        logits = np.empty((batch, width, signature.vocab_size), np.float32)
        hidden = np.empty((batch, width, len(signature.taps) * signature.hidden_size), np.float32)
        for name, array in ((LOGITS, logits), (HIDDEN_STATES, hidden)):
            binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
        self._engine.run_with_iobinding(binding)
        return logits, hidden


def _with_capacity(caches: list[Array], tokens: int) -> list[Array]:
    """Room for `tokens` rows: in steps, because attention costs by the capacity of the cache."""
    batch, heads, capacity, head_dim = caches[0].shape
    if tokens <= capacity:
        return caches
    grown = []
    for cache in caches:
        larger = np.zeros((batch, heads, -(-tokens // CAPACITY_STEP) * CAPACITY_STEP, head_dim), cache.dtype)
        larger[:, :, :capacity] = cache
        grown.append(larger)
    return grown
