"""Calls on a GPU for one sequence or several: everything on the device but token ids, verdicts and hidden states."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.engines.signature import (
    CACHE_LENGTH,
    FEATURES,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGITS,
    POSITION_IDS,
    TREE_MASK,
    Signature,
    past,
    present,
)
from specrun.runner.call_costs import CallCosts
from specrun.runner.cuda.engine import SEQUENCES, TOKENS, DeviceEngine, Shape, Tensor, fitting, widest
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.kv_cache import DeviceKVCache
from specrun.runner.cuda.logits import DeviceLogits
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.session import Output
from specrun.runner.slot_session import SlotCall
from specrun.runner.tree import padded_mask

Array = np.ndarray[Any, Any]


class DeviceSlotEngine:
    """As `SlotEngine`. A call takes the smallest shape that has room; what is too much is padding: rows that see
    themselves alone, that nobody sees, and that the next call overwrites. Several slots are served by a call for all.

    The mask has as many columns in every call as the widest one has tokens: the last rows of the cache, the call's own
    at the end. Those of committed tokens are visible.
    """

    def __init__(
        self,
        gpu: Gpu,
        engine: DeviceEngine,
        signature: Signature,
        cache: DeviceKVCache,
        dtype: str,
        logits: DeviceLogits,
        name: str,
        costs: CallCosts | None = None,
    ) -> None:
        """`cache`: of this model, or of one that it shares layers with. `dtype`: NumPy name of the type of caches,
        features and hidden states. `costs`: gets each call, under `name`; calls are waited for then."""
        self._gpu, self._engine, self._cache, self._logits = gpu, engine, cache, logits
        self._name, self._costs = name, costs
        self.max_tokens = self._widest = widest(engine)
        widths = sorted({shape.width for shape in engine.shapes})
        self.max_nodes = self._widest - widths[-2] if len(widths) > 1 else 0
        self._inputs: dict[str, Mirror] = {}
        self._hidden: Mirror | None = None
        inputs, outputs = {}, {}
        for key, shape, kind in (
            (INPUT_IDS, (SEQUENCES, TOKENS), "int64"),
            (POSITION_IDS, (SEQUENCES, TOKENS), "int64"),
            (CACHE_LENGTH, (SEQUENCES,), "int64"),
            (TREE_MASK, (SEQUENCES, TOKENS, self._widest), "bool"),
            *([(FEATURES, (SEQUENCES, TOKENS, signature.hidden_size), dtype)] if signature.reads_features else []),
        ):
            mirror = self._inputs[key] = self._mirror(shape, kind)
            inputs[key] = Tensor(int(mirror.pointer), shape, kind)
        outputs[LOGITS] = Tensor(logits.address, (SEQUENCES, TOKENS, signature.vocab_size), dtype)
        if signature.taps:
            shape = (SEQUENCES, TOKENS, len(signature.taps) * signature.hidden_size)
            self._hidden = self._mirror(shape, dtype)
            outputs[HIDDEN_STATES] = Tensor(int(self._hidden.pointer), shape, dtype)
        for layer, part in signature.cache_parts():
            shape = (SEQUENCES, signature.kv_heads, cache.rows, signature.head_dim)
            buffer = Tensor(cache.address(layer, part), shape, dtype, cache.slot_bytes)
            inputs[past(layer, part)] = outputs[present(layer, part)] = buffer
        engine.bind(inputs, outputs)

    def together(self, calls: Sequence[SlotCall]) -> int:
        """All that fit into one call for every slot, as long as the first does."""
        count = 0
        while count < len(calls) and self._fits(calls[: count + 1], self._cache.slots):
            count += 1
        return max(1, count)

    def _fits(self, calls: Sequence[SlotCall], batch: int) -> Shape | None:
        width, before = max(len(call.tokens) for call in calls), max(call.before for call in calls)
        shape = fitting(self._engine, batch, width)
        return shape if shape is not None and before + shape.width <= self._widest else None

    def call(self, calls: Sequence[SlotCall]) -> list[Output]:
        """As `SlotEngine.call`. Raises DeviceError."""
        shape = self._fits(calls, 1 if len(calls) == 1 else self._cache.slots)
        if shape is None:
            (call, *_) = calls
            raise AssertionError(
                f"got {len(call.tokens)} tokens below {call.before} nodes, the engine takes {self._widest}"
            )
        first = calls[0].slot if shape.batch == 1 else 0
        self._gpu.sync()  # the device has read what the last call was given
        start = time.perf_counter()
        self._fill(calls, shape, first)
        with device_errors(f"a call of {shape.width} tokens"):
            self._engine.run(shape, first)
            if self._hidden is not None:
                self._hidden.download(self._gpu.stream)
        if self._hidden is not None or self._costs is not None:
            self._gpu.sync()
        if self._costs is not None:
            self._costs.call(self._name, shape.batch, shape.width, time.perf_counter() - start)
        return [self._output(call, shape, first) for call in calls]

    def _output(self, call: SlotCall, shape: Shape, first: int) -> Output:
        at, count = call.slot - first, len(call.tokens)
        self._cache.written[call.slot] = max(self._cache.written[call.slot], call.written + count)
        hidden = None
        if self._hidden is not None:
            columns = self._hidden.array.shape[-1]
            rows = self._hidden.array.reshape(-1, columns)[at * shape.width : at * shape.width + count]
            hidden = rows.astype(np.float32)
        return Output(self._logits.rows(at * shape.width + count - call.wanted, call.wanted), hidden)

    def _fill(self, calls: Sequence[SlotCall], shape: Shape, first: int) -> None:
        """The inputs. Slots that take no part write their padding behind what they hold."""
        size = shape.batch, shape.width
        ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        written = np.array(self._cache.written[first : first + shape.batch], np.int64)
        mask = np.empty((*size, self._widest), bool)
        mask[:] = padded_mask(np.zeros((0, 0), bool), 0, shape.width, self._widest)
        features = None
        for call in calls:
            at, count = call.slot - first, len(call.tokens)
            ids[at, :count] = call.tokens
            positions[at, :count] = call.length + call.depths
            written[at] = call.written
            mask[at] = padded_mask(call.mask, call.before, shape.width, self._widest)
            if call.features is not None:
                if features is None:
                    features = np.zeros((*size, call.features.shape[-1]), call.features.dtype)
                features[at, :count] = call.features
        for name, values in ((INPUT_IDS, ids), (POSITION_IDS, positions), (CACHE_LENGTH, written), (TREE_MASK, mask)):
            self._write(name, values)
        if features is not None:
            self._write(FEATURES, features)

    def _mirror(self, shape: tuple[int, ...], dtype: str) -> Mirror:
        sizes = {TOKENS: self._widest, SEQUENCES: self._cache.slots}
        return Mirror(self._gpu.device, self._gpu.stream, tuple(sizes.get(axis, axis) for axis in shape), dtype)

    def _write(self, name: str, values: Array) -> None:
        """Into the front of an input's buffer: a smaller call has a smaller array."""
        mirror = self._inputs[name]
        mirror.array.reshape(-1)[: values.size] = values.reshape(-1)
        with device_errors(f"copying {name}"):
            mirror.upload(self._gpu.stream)
