"""A session on a GPU: calls of fixed widths, everything on the device but token ids, verdicts and hidden states."""

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
from specrun.runner.cuda.engine import TOKENS, DeviceEngine, Tensor
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.kv_cache import DeviceKVCache
from specrun.runner.cuda.logits import DeviceLogits
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.session import Output
from specrun.runner.tree import Ancestry, padded_mask

Array = np.ndarray[Any, Any]


class DeviceSession:
    """A call takes the next larger width; what is too much is padding: rows that see themselves alone, that nobody
    sees, and that the next call overwrites.

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
    ) -> None:
        """`cache`: of this model, or of one that it shares layers with. `dtype`: NumPy name of the type of caches,
        features and hidden states."""
        self._gpu, self._engine, self._cache, self._logits = gpu, engine, cache, logits
        self._widest = widest = engine.widths[-1]
        self._length = 0
        self._nodes = Ancestry()
        self._inputs: dict[str, Mirror] = {}
        self._hidden: Mirror | None = None
        inputs, outputs = {}, {}
        for name, shape, kind in (
            (INPUT_IDS, (1, TOKENS), "int64"),
            (POSITION_IDS, (1, TOKENS), "int64"),
            (CACHE_LENGTH, (1,), "int64"),
            (TREE_MASK, (1, TOKENS, widest), "bool"),
            *([(FEATURES, (1, TOKENS, signature.hidden_size), dtype)] if signature.reads_features else []),
        ):
            mirror = self._inputs[name] = self._mirror(shape, kind)
            inputs[name] = Tensor(int(mirror.pointer), shape, kind)
        outputs[LOGITS] = Tensor(logits.address, (1, TOKENS, signature.vocab_size), dtype)
        if signature.taps:
            shape = (1, TOKENS, len(signature.taps) * signature.hidden_size)
            self._hidden = self._mirror(shape, dtype)
            outputs[HIDDEN_STATES] = Tensor(int(self._hidden.pointer), shape, dtype)
        for layer, part in signature.cache_parts():
            shape = (1, signature.kv_heads, cache.rows, signature.head_dim)
            buffer = Tensor(cache.address(layer, part), shape, dtype)
            inputs[past(layer, part)] = outputs[present(layer, part)] = buffer
        engine.bind(inputs, outputs)

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_tokens(self) -> int:
        return self._widest

    @property
    def max_nodes(self) -> int:
        return self._widest - self._engine.widths[-2] if len(self._engine.widths) > 1 else 0

    def grow(self, tokens: Sequence[int], parents: Sequence[int], features: Array | None = None) -> Output:
        """As `Session.grow`. Raises CapacityError or DeviceError."""
        before, count = len(self._nodes), len(tokens)
        written = self._length + before
        self._cache.require(written + count)
        depths, mask = self._nodes.add(parents)
        width = next((width for width in self._engine.widths if width >= count), None)
        if width is None or before + width > self._widest:
            raise AssertionError(f"got {count} tokens below {before} nodes, the engine takes {self._widest}")
        self._gpu.sync()  # the device has read what the last call was given
        self._write(INPUT_IDS, np.pad(tokens, (0, width - count)))
        self._write(POSITION_IDS, np.pad(self._length + depths, (0, width - count)))
        self._write(CACHE_LENGTH, np.array([written]))
        self._write(TREE_MASK, padded_mask(mask, before, width, self._widest))
        if features is not None:
            self._write(FEATURES, np.pad(features, ((0, width - count), (0, 0))))
        with device_errors(f"a call of {width} tokens"):
            self._engine.run(width)
            if self._hidden is not None:
                self._hidden.download(self._gpu.stream)
        hidden = None
        if self._hidden is not None:
            self._gpu.sync()
            hidden = self._hidden.array[0, :count].astype(np.float32)
        return Output(self._logits.of_call(count), hidden)

    def keep(self, nodes: Sequence[int]) -> None:
        self._cache.gather(self._length, nodes)
        self._length += len(nodes)
        self._nodes.clear()

    def truncate(self, length: int) -> None:
        # Not "<= self._length": an early exit takes over rows that the target wrote.
        if not 0 <= length <= self._cache.capacity:
            raise AssertionError(f"cannot truncate to {length}: the cache has room for {self._cache.capacity}")
        self._length = length
        self._nodes.clear()

    def _mirror(self, shape: tuple[int, ...], dtype: str) -> Mirror:
        whole = tuple(self._widest if axis == TOKENS else axis for axis in shape)
        return Mirror(self._gpu.device, self._gpu.stream, whole, dtype)

    def _write(self, name: str, values: Array) -> None:
        """Into the front of an input's buffer: a narrow call has the shorter rows of a smaller array."""
        mirror = self._inputs[name]
        mirror.array.reshape(-1)[: values.size] = values.reshape(-1)
        with device_errors(f"copying {name}"):
            mirror.upload(self._gpu.stream)
