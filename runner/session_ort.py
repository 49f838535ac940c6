"""A session on ONNX Runtime, CPU provider."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.backend import LEAST_ROWS, one_sequence_file
from specrun.engines.manifest import TARGET
from specrun.engines.ort import load_engine
from specrun.engines.signature import (
    CACHE_LENGTH,
    FEATURES,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITION_IDS,
    TREE_MASK,
    Signature,
    past,
    present,
)
from specrun.runner.call_costs import WIDEST_TIMED, CallCosts
from specrun.runner.kv_cache import KVCache
from specrun.runner.logits import FUSE, HostLogits
from specrun.runner.output_buffers import OutputBuffers
from specrun.runner.session import Output
from specrun.runner.tree import Ancestry

Array = np.ndarray[Any, Any]


class OrtSession:
    """Calls of any width. Caches are updated in place; each call's outputs overwrite the last one's."""

    def __init__(
        self,
        engine: Path,
        signature: Signature,
        cache: KVCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
        least_rows: int = 1,
        name: str = TARGET,
        costs: CallCosts | None = None,
    ) -> None:
        """`engine`: the file beside it for one sequence is preferred. `cache`: of this model, or of one that it shares
        layers with. `dtype`: NumPy name of the type of its logits. `vocabulary_size`: logits beyond it are cut off
        (padding, tokens that a partner model lacks). `ids`: the token of each logit, of a draft with a reduced
        vocabulary.
        `least_rows`: that a call writes into the cache, whatever its tokens; see `engines/one_sequence.py`.
        `name`: of the model, for `costs`."""
        one = one_sequence_file(engine)
        self._session = load_engine(one if one.is_file() else engine)
        self._signature = signature
        self._vocabulary_size = vocabulary_size
        self._ids = ids
        self._cache = cache
        self._least_rows = least_rows
        self._name, self._costs = name, costs
        self._cache_version = -1
        self._length = 0
        self._nodes = Ancestry()
        self._dtype = dtype
        self._outputs = OutputBuffers(signature, dtype)
        self._binding = self._session.io_binding()

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_tokens(self) -> int:
        return sys.maxsize

    @property
    def max_nodes(self) -> int:
        return sys.maxsize

    def grow(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        features: Array | None = None,
        wanted: int | None = None,
    ) -> Output:
        written = self._length + len(self._nodes)
        self._cache.require(written + len(tokens))
        depths, mask = self._nodes.add(parents)
        count = len(tokens)
        wanted = count if wanted is None else wanted
        self._cache.reserve(written, written + max(count, self._least_rows))
        if self._cache.version != self._cache_version:
            self._bind_cache()
        inputs = {
            INPUT_IDS: np.array([tokens], np.int64),
            POSITION_IDS: (self._length + depths)[None],
            CACHE_LENGTH: np.array([written], np.int64),
            TREE_MASK: mask[None],
            LOGIT_ROWS: np.arange(count - wanted, count)[None],
        }
        if features is not None:
            inputs[FEATURES] = features[None].astype(self._dtype, copy=False)
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        logits = self._outputs.bind(self._binding, LOGITS, 1, wanted)[0]
        hidden = self._outputs.bind(self._binding, HIDDEN_STATES, 1, count)[0] if self._signature.taps else None
        start = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        timed = None
        if self._costs is not None:
            self._costs.call(self._name, 1, count, time.perf_counter() - start)
            timed = self._costs.observe
        return Output(
            HostLogits(logits[:, : self._vocabulary_size].astype(np.float32, copy=False), self._ids, timed),
            None if hidden is None else hidden.astype(np.float32, copy=False),
        )

    def keep(self, nodes: Sequence[int]) -> None:
        self._cache.gather(self._length, nodes)
        self._length += len(nodes)
        self._nodes.clear()

    def truncate(self, length: int) -> None:
        # Not "<= self._length": an early exit takes over rows that the target wrote.
        if not 0 <= length <= self._cache.rows:
            raise AssertionError(f"cannot truncate to {length}: the cache has {self._cache.rows} rows")
        self._length = length
        self._nodes.clear()

    def _bind_cache(self) -> None:
        for layer, part, buffer in self._cache.buffers(self._signature):
            self._binding.bind_ortvalue_input(past(layer, part), buffer)
            self._binding.bind_ortvalue_output(present(layer, part), buffer)
        self._cache_version = self._cache.version


class OrtLoader:
    """Loads engines for ONNX Runtime's CPU provider; what `runner/loader.py` asks for."""

    def __init__(self, quantized: bool, costs: CallCosts) -> None:
        """`quantized`: the bundle. `costs`: gets the time of each call."""
        self._least_rows = LEAST_ROWS if quantized else 1
        self._costs = costs

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> KVCache:
        return KVCache(signature, dtype, capacity, spare_rows=self._least_rows - 1)

    def target(
        self, engine: Path, signature: Signature, cache: KVCache, dtype: str, vocabulary_size: int
    ) -> OrtSession:
        return OrtSession(
            engine,
            signature,
            cache,
            dtype,
            vocabulary_size,
            least_rows=self._least_rows,
            costs=self._costs,
        )

    def draft(
        self,
        name: str,
        engine: Path,
        signature: Signature,
        cache: KVCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
    ) -> OrtSession:
        return OrtSession(
            engine, signature, cache, dtype, vocabulary_size, ids, self._least_rows, name=name, costs=self._costs
        )

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], HostLogits]:
        run = self.rows(name, engine, dtype)
        return lambda hidden: HostLogits(run(hidden[None])[0, :, :vocabulary_size], ids, self._costs.observe)

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]:
        return self.rows(FUSE, engine, dtype)

    def rows(self, name: str, engine: Path, dtype: str) -> Callable[[Array], Array]:
        """What an engine without a cache makes of hidden states: float32 [rows, ...] of [rows, width]."""
        session = load_engine(engine)

        def run(hidden: Array) -> Array:
            start = time.perf_counter()
            (found,) = session.run(None, {HIDDEN_STATES: hidden[None].astype(dtype, copy=False)})
            if len(hidden) <= WIDEST_TIMED:
                self._costs.observe(name, len(hidden), time.perf_counter() - start)
            return np.asarray(found[0], np.float32)

        return run
