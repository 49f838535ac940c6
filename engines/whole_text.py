"""A compiled language model that reads whole texts at once: to measure it, not to run it."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime

from specrun.engines import ort
from specrun.engines.signature import (
    CACHE_LENGTH,
    FEATURES,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITION_IDS,
    TREE_MASK,
    Signature,
    past,
    present,
)

MAX_TEXT_TOKENS = 256
TIMED_CALLS = 9


class WholeTextModel:
    """Calls on an empty KV cache, of at most MAX_TEXT_TOKENS tokens."""

    def __init__(self, engine: Path, signature: Signature) -> None:
        self._session = ort.load_engine(engine)
        self._selects_rows = LOGIT_ROWS in {each.name for each in self._session.get_inputs()}
        self._signature = signature
        self._binding = self._session.io_binding()
        dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self._dtype = dtype[self._session.get_outputs()[0].type]
        shape = (1, signature.kv_heads, MAX_TEXT_TOKENS, signature.head_dim)
        for part in signature.cache_parts():
            cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, self._dtype))
            self._binding.bind_ortvalue_input(past(*part), cache)
            self._binding.bind_ortvalue_output(present(*part), cache)

    def logits(self, text: Sequence[int]) -> np.ndarray[Any, Any]:
        """What follows each of the first MAX_TEXT_TOKENS tokens: [tokens, vocabulary]."""
        return self.read(text, {LOGITS: self._signature.vocab_size})[LOGITS]

    def read(
        self, text: Sequence[int], outputs: Mapping[str, int], features: np.ndarray[Any, Any] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Outputs of the graph, each [tokens, columns]. `outputs`: their columns by name. `features` [tokens, hidden]:
        for models that read them."""
        tokens = list(text[:MAX_TEXT_TOKENS])
        width = len(tokens)
        inputs = {
            INPUT_IDS: np.array([tokens], np.int64),
            POSITION_IDS: np.arange(width)[None],
            CACHE_LENGTH: np.zeros(1, np.int64),
            TREE_MASK: np.tri(width, dtype=bool)[None],
        }
        if self._selects_rows:
            inputs[LOGIT_ROWS] = np.arange(width)[None]
        if features is not None:
            inputs[FEATURES] = np.ascontiguousarray(features[None, :width], self._dtype)
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        values = {name: np.empty((1, width, columns), self._dtype) for name, columns in outputs.items()}
        for name, value in values.items():
            self._binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
        self._session.run_with_iobinding(self._binding)
        return {name: value[0] for name, value in values.items()}

    def choices(self, text: Sequence[int]) -> np.ndarray[Any, Any]:
        """The greedy choice after each token."""
        return np.asarray(self.logits(text).argmax(-1))

    def step_seconds(self) -> float:
        """How long a call of one token takes."""
        times = []
        for _ in range(TIMED_CALLS):
            start = time.perf_counter()
            self.logits([0])
            times.append(time.perf_counter() - start)
        return median(times)
