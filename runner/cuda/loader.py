"""Loads the engines of a bundle onto the GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.backend import ORT_CUDA
from specrun.engines.manifest import TARGET, Bundle
from specrun.engines.signature import FEATURES, HIDDEN_STATES, LOGITS, Signature
from specrun.runner.call_costs import CallCosts
from specrun.runner.cuda.engine import TOKENS, DeviceEngine, Shape, Tensor, fitting, widest
from specrun.runner.cuda.engine_ort import OrtCudaEngine
from specrun.runner.cuda.engine_tensorrt import TensorRtEngine
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.kv_cache import DeviceKVCache
from specrun.runner.cuda.logits import DeviceLogits, DeviceRows
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.cuda.slot_engine import DeviceSlotEngine
from specrun.runner.slot_session import SlotSession, at_once

Array = np.ndarray[Any, Any]


class CudaMaker:
    """Makes engines and caches for a number of slots, on one GPU and one stream; as `Maker`."""

    def __init__(self, bundle: Bundle, gpu: Gpu, slots: int, costs: CallCosts | None = None) -> None:
        self._bundle, self._gpu, self._slots, self._costs = bundle, gpu, slots, costs
        self._vocabulary_size = bundle.manifest.target.vocabulary_size

    @classmethod
    def open(cls, bundle: Bundle, slots: int, costs: CallCosts | None = None) -> "CudaMaker":
        """Raises UnfitError."""
        return cls(bundle, Gpu.open(bundle), slots, costs)

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> DeviceKVCache:
        rows = capacity + self._bundle.manifest.engine_widths[-1]
        return DeviceKVCache(self._gpu, signature, dtype, capacity, rows, self._slots)

    def engine(
        self,
        name: str,
        file: Path,
        signature: Signature,
        cache: DeviceKVCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None,
    ) -> DeviceSlotEngine:
        opened = self._open(file, self._slots)
        rows = max(shape.batch * shape.width for shape in opened.shapes)
        logits = DeviceLogits(self._gpu, rows, signature.vocab_size, vocabulary_size, dtype, self._vocabulary_size, ids)
        return DeviceSlotEngine(self._gpu, opened, signature, cache, dtype, logits, name, self._costs)

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], DeviceRows]:
        width, heads, columns = shape
        opened = self._open(engine)
        states = self._mirror(opened, width, dtype)
        logits = DeviceLogits(
            self._gpu, widest(opened) * heads, columns, vocabulary_size, dtype, self._vocabulary_size, ids
        )
        opened.bind(
            {HIDDEN_STATES: Tensor(int(states.pointer), (1, TOKENS, width), dtype)},
            {LOGITS: Tensor(logits.address, (1, TOKENS, heads, columns), dtype)},
        )

        def guess(hidden: Array) -> DeviceRows:
            self._call(opened, states, hidden[None])
            return logits.rows(0, heads)

        return guess

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]:
        width, hidden_size = shape
        opened = self._open(engine)
        states, features = self._mirror(opened, width, dtype), self._mirror(opened, hidden_size, dtype)
        opened.bind(
            {HIDDEN_STATES: Tensor(int(states.pointer), (1, TOKENS, width), dtype)},
            {FEATURES: Tensor(int(features.pointer), (1, TOKENS, hidden_size), dtype)},
        )

        def fuse(hidden: Array) -> Array:
            self._call(opened, states, hidden)
            with device_errors("reading features"):
                features.download(self._gpu.stream)
            self._gpu.sync()
            return features.array[: len(hidden)].astype(np.float32)

        most = widest(opened)
        return lambda hidden: np.concatenate(
            [fuse(hidden[start : start + most]) for start in range(0, len(hidden), most)]
        )

    def _open(self, engine: Path, slots: int = 1) -> DeviceEngine:
        manifest = self._bundle.manifest
        if manifest.backend == ORT_CUDA:
            shapes = manifest.shapes if slots > 1 else tuple((1, width) for width in manifest.engine_widths)
            return OrtCudaEngine(engine, tuple(Shape(*shape) for shape in shapes), self._gpu)
        return TensorRtEngine(manifest.backend, engine, manifest.versions[manifest.backend], self._gpu)

    def _mirror(self, engine: DeviceEngine, columns: int, dtype: str) -> Mirror:
        return Mirror(self._gpu.device, self._gpu.stream, (widest(engine), columns), dtype)

    def _call(self, engine: DeviceEngine, states: Mirror, hidden: Array) -> None:
        shape = fitting(engine, 1, len(hidden))
        assert shape is not None
        self._gpu.sync()
        states.array[: len(hidden)] = hidden
        states.array[len(hidden) : shape.width] = 0
        with device_errors(f"a call of {shape.width} tokens"):
            states.upload(self._gpu.stream)
            engine.run(shape)


class CudaLoader:
    """What `runner/loader.py` asks for, of one request at a time."""

    def __init__(self, maker: CudaMaker) -> None:
        self._maker = maker
        self.cache, self.heads, self.fuse = maker.cache, maker.heads, maker.fuse

    @classmethod
    def open(cls, bundle: Bundle) -> "CudaLoader":
        """Raises UnfitError."""
        # Engines that decode at one shape only take all slots for it.
        return cls(CudaMaker.open(bundle, bundle.manifest.slots if bundle.manifest.quantized else 1))

    def target(
        self, engine: Path, signature: Signature, cache: DeviceKVCache, dtype: str, vocabulary_size: int
    ) -> SlotSession:
        return self.draft(TARGET, engine, signature, cache, dtype, vocabulary_size)

    def draft(
        self,
        name: str,
        engine: Path,
        signature: Signature,
        cache: DeviceKVCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
    ) -> SlotSession:
        opened = self._maker.engine(name, engine, signature, cache, dtype, vocabulary_size, ids)
        return SlotSession(at_once, opened, cache, slot=0)
