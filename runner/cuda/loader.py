"""Loads the engines of a bundle onto the GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.backend import ORT_CUDA
from specrun.engines.manifest import TARGET, Bundle
from specrun.engines.signature import FEATURES, HIDDEN_STATES, LOGITS, Signature
from specrun.runner.cuda.engine import TOKENS, DeviceEngine, Tensor
from specrun.runner.cuda.engine_ort import OrtCudaEngine
from specrun.runner.cuda.engine_tensorrt import TensorRtEngine
from specrun.runner.cuda.gpu import Gpu, device_errors
from specrun.runner.cuda.kv_cache import DeviceKVCache
from specrun.runner.cuda.logits import DeviceLogits
from specrun.runner.cuda.mirror import Mirror
from specrun.runner.cuda.session import DeviceSession

Array = np.ndarray[Any, Any]


class CudaLoader:
    """What `runner/loader.py` asks for, on one GPU and one stream."""

    def __init__(self, bundle: Bundle, gpu: Gpu) -> None:
        self._bundle, self._gpu = bundle, gpu
        self._vocabulary_size = bundle.manifest.target.vocabulary_size

    @classmethod
    def open(cls, bundle: Bundle) -> "CudaLoader":
        """Raises UnfitError."""
        return cls(bundle, Gpu.open(bundle))

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> DeviceKVCache:
        return DeviceKVCache(self._gpu, signature, dtype, capacity, capacity + self._bundle.manifest.engine_widths[-1])

    def target(
        self, engine: Path, signature: Signature, cache: DeviceKVCache, dtype: str, vocabulary_size: int
    ) -> DeviceSession:
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
    ) -> DeviceSession:
        opened = self._open(engine)
        logits = DeviceLogits(
            self._gpu,
            opened.widths[-1],
            signature.vocab_size,
            vocabulary_size,
            dtype,
            self._vocabulary_size,
            ids,
        )
        return DeviceSession(self._gpu, opened, signature, cache, dtype, logits)

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], DeviceLogits]:
        width, heads, columns = shape
        opened = self._open(engine)
        states = self._mirror(opened, width, dtype)
        logits = DeviceLogits(
            self._gpu, opened.widths[-1] * heads, columns, vocabulary_size, dtype, self._vocabulary_size, ids
        )
        opened.bind(
            {HIDDEN_STATES: Tensor(int(states.pointer), (1, TOKENS, width), dtype)},
            {LOGITS: Tensor(logits.address, (1, TOKENS, heads, columns), dtype)},
        )

        def guess(hidden: Array) -> DeviceLogits:
            self._call(opened, states, hidden[None])
            return logits.of_call(heads)

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

        widest = opened.widths[-1]
        return lambda hidden: np.concatenate(
            [fuse(hidden[start : start + widest]) for start in range(0, len(hidden), widest)]
        )

    def _open(self, engine: Path) -> DeviceEngine:
        manifest = self._bundle.manifest
        if manifest.backend == ORT_CUDA:
            return OrtCudaEngine(engine, manifest.engine_widths, self._gpu)
        return TensorRtEngine(manifest.backend, engine, manifest.versions[manifest.backend], self._gpu)

    def _mirror(self, engine: DeviceEngine, columns: int, dtype: str) -> Mirror:
        return Mirror(self._gpu.device, self._gpu.stream, (engine.widths[-1], columns), dtype)

    def _call(self, engine: DeviceEngine, states: Mirror, hidden: Array) -> None:
        width = next(width for width in engine.widths if width >= len(hidden))
        self._gpu.sync()
        states.array[: len(hidden)] = hidden
        states.array[len(hidden) : width] = 0
        with device_errors(f"a call of {width} tokens"):
            states.upload(self._gpu.stream)
            engine.run(width)
