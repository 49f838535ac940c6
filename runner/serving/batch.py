"""Engines and KV caches of several sequences: one call reads tokens of many slots."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from specrun.engines.manifest import Bundle
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
from specrun.runner.call_costs import WIDE, CallCosts
from specrun.runner.kv_cache import FIRST_ROWS
from specrun.runner.logits import FUSE, HostLogits
from specrun.runner.output_buffers import OutputBuffers
from specrun.runner.session import Output
from specrun.runner.session_ort import OrtLoader
from specrun.runner.slot_session import Rows, SlotCall, Wait
from specrun.runner.tree import padded_mask

Array = np.ndarray[Any, Any]


class BatchCache:
    """Buffers [slots, kv_heads, rows, head_dim], each input and output of every call, for slots that follow each other.

    All slots have as many rows as the longest needs, because a call has one shape; they start small again when nothing
    runs.
    """

    def __init__(self, signature: Signature, dtype: str, capacity: int, slots: int, spare_rows: int) -> None:
        """`spare_rows`: beyond the capacity, for the padding of wide calls."""
        self.capacity = capacity
        self.version = 0  # counts how often the buffers moved
        self.written = [0] * slots  # rows of each slot that hold something
        self._most_rows = capacity + spare_rows
        self._shape = (slots, signature.kv_heads, signature.head_dim)
        self._dtype = dtype
        self.rows = min(FIRST_ROWS, self._most_rows)
        self._arrays = {part: self._zeros(self.rows) for part in signature.cache_parts()}

    def _zeros(self, rows: int) -> Array:
        slots, heads, columns = self._shape
        return np.zeros((slots, heads, rows, columns), self._dtype)

    def buffers(self, signature: Signature, first: int, end: int) -> Iterator[tuple[int, str, ort.OrtValue]]:
        """(layer, "key" | "value", buffer) of the slots from `first` to before `end`."""
        for layer, part in signature.cache_parts():
            yield layer, part, ort.OrtValue.ortvalue_from_numpy(self._arrays[layer, part][first:end])

    def reserve(self, count: int) -> None:
        """Make room for `count` rows."""
        rows = FIRST_ROWS
        while rows < count:
            rows *= 2
        rows = min(rows, self._most_rows)
        assert rows >= count, "more rows than the cache has"
        if rows <= self.rows and (rows == self.rows or any(self.written)):
            return
        kept = min(rows, self.rows) if any(self.written) else 0
        for part, old in self._arrays.items():
            self._arrays[part] = self._zeros(rows)
            self._arrays[part][:, :, :kept] = old[:, :, :kept]
        self.rows = rows
        self.version += 1

    def read(self, slot: int, count: int) -> Rows:
        """A copy of a slot's first rows."""
        return {part: array[slot, :, :count].copy() for part, array in self._arrays.items()}

    def write(self, slot: int, rows: Rows, count: int) -> None:
        """Give a slot that has none its first rows."""
        self.reserve(count)
        for part, array in rows.items():
            self._arrays[part][slot, :, :count] = array[:, :count]
        self.written[slot] = max(self.written[slot], count)

    def gather(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Move `rows` of a slot, ascending and counted from `start`, together to `start`."""
        first = next((at for at, row in enumerate(rows) if row != at), len(rows))  # those before are in place
        if first == len(rows):
            return
        source = [start + row for row in rows[first:]]
        for array in self._arrays.values():
            array[slot, :, start + first : start + len(rows)] = array[slot, :, source].swapaxes(0, 1)


class RowEngine:
    """Calls on hidden states that know nothing of each other: Medusa's heads, EAGLE-3's fusion."""

    def __init__(self, run: Callable[[Array], Array]) -> None:
        """`run`: [rows, ...] out of [rows, width]."""
        self.run = run

    def together(self, calls: Sequence[Array]) -> int:
        return len(calls)

    def call(self, calls: Sequence[Array]) -> list[Array]:
        """What each gets of one call for all."""
        ends = np.cumsum([len(rows) for rows in calls])
        return np.split(self.run(np.concatenate(calls)), ends[:-1])


class BatchEngine:
    """Calls of any width over slots that follow each other. Slots between them that take no part get padding."""

    def __init__(
        self,
        engine: Path,
        signature: Signature,
        cache: BatchCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None,
        costs: CallCosts,
        name: str,
    ) -> None:
        """`vocabulary_size`, `ids`: as `Loader` has them. `costs`: gets each call, under `name`."""
        self._costs, self._name = costs, name
        self._vocabulary_size, self._ids = vocabulary_size, ids
        self.max_tokens = self.max_nodes = cache.capacity
        self._session = load_engine(engine)
        self._signature = signature
        self._cache = cache
        self._dtype = dtype
        self._bindings: dict[tuple[int, int], Any] = {}
        self._bound_version = -1
        self._outputs = OutputBuffers(signature, dtype)

    def together(self, calls: Sequence[SlotCall]) -> int:
        return len(calls)

    def call(self, calls: Sequence[SlotCall]) -> list[Output]:
        """As `SlotEngine.call`."""
        first, end = min(call.slot for call in calls), max(call.slot for call in calls) + 1
        batch, width = end - first, max(len(call.tokens) for call in calls)
        if width == batch == 1:
            width = 2  # a single row would be rounded otherwise than several
        written = self._cache.written[first:end]
        for call in calls:
            written[call.slot - first] = call.written
        self._cache.reserve(max(written) + width)
        columns = width + max(call.before for call in calls)
        ids, positions = np.zeros((batch, width), np.int64), np.zeros((batch, width), np.int64)
        mask = np.empty((batch, width, columns), bool)
        if len(calls) < batch:
            mask[:] = padded_mask(np.zeros((0, 0), bool), 0, width, columns)
        features = None
        if self._signature.reads_features:
            features = np.zeros((batch, width, self._signature.hidden_size), self._dtype)
        most = max(call.wanted for call in calls)
        if most == batch == 1:
            most = 2  # as above
        rows = np.zeros((batch, most), np.int64)
        for call in calls:
            at, count = call.slot - first, len(call.tokens)
            ids[at, :count] = call.tokens
            positions[at, :count] = call.length + call.depths
            mask[at] = padded_mask(call.mask, call.before, width, columns)
            if features is not None:
                features[at, :count] = call.features
            rows[at, : call.wanted] = range(count - call.wanted, count)
            self._cache.written[call.slot] = max(self._cache.written[call.slot], call.written + count)
        binding = self._binding(first, end)
        inputs = {
            INPUT_IDS: ids,
            POSITION_IDS: positions,
            CACHE_LENGTH: np.array(written, np.int64),
            TREE_MASK: mask,
            LOGIT_ROWS: rows,
            **({} if features is None else {FEATURES: features}),
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        logits = self._outputs.bind(binding, LOGITS, batch, most)
        hidden = self._outputs.bind(binding, HIDDEN_STATES, batch, width) if self._signature.taps else None
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        # What slots between them cost is part of it.
        self._costs.call(self._name, len(calls), width, time.perf_counter() - start)
        found = []
        for call in calls:
            at, count = call.slot - first, len(call.tokens)
            read = logits[at, : call.wanted, : self._vocabulary_size].astype(np.float32, copy=False)
            states = None if hidden is None else hidden[at, :count].astype(np.float32, copy=False)
            found.append(Output(HostLogits(read, self._ids, self._costs.observe), states))
        return found

    def _binding(self, first: int, end: int) -> Any:
        if self._bound_version != self._cache.version:
            self._bindings.clear()  # they keep the old buffers alive
            self._bound_version = self._cache.version
        if (first, end) not in self._bindings:
            binding = self._bindings[first, end] = self._session.io_binding()
            for layer, part, buffer in self._cache.buffers(self._signature, first, end):
                binding.bind_ortvalue_input(past(layer, part), buffer)
                binding.bind_ortvalue_output(present(layer, part), buffer)
        return self._bindings[first, end]


class HostMaker:
    """Makes engines on ONNX Runtime's CPU provider for a number of slots; as `Maker`."""

    def __init__(self, bundle: Bundle, slots: int, costs: CallCosts, wait: Wait) -> None:
        self._slots, self._costs, self._wait = slots, costs, wait
        self._widest = max(bundle.manifest.widths)
        self._host = OrtLoader(quantized=False, costs=costs)

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> BatchCache:
        return BatchCache(signature, dtype, capacity, self._slots, self._widest)

    def engine(
        self,
        name: str,
        file: Path,
        signature: Signature,
        cache: BatchCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None,
    ) -> BatchEngine:
        return BatchEngine(file, signature, cache, dtype, vocabulary_size, ids, self._costs, name)

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], HostLogits]:
        run = self._rows(name, engine, dtype)
        return lambda hidden: HostLogits(run(hidden[None])[0, :, :vocabulary_size], ids, self._costs.observe)

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]:
        return self._rows(FUSE, engine, dtype)

    def _rows(self, name: str, engine: Path, dtype: str) -> Callable[[Array], Array]:
        opened = RowEngine(self._host.rows(name, engine, dtype))

        def run(hidden: Array) -> Array:
            if len(hidden) > WIDE:  # of a prompt: cheaper than waiting for others
                return opened.run(hidden)
            return np.asarray(self._wait(opened, hidden, len(hidden)))

        return run
