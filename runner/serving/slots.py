"""Slots: each holds one sequence in the caches that all share, and has a runner of its own."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines.manifest import EARLY_EXIT, TARGET, Bundle
from specrun.engines.signature import Signature
from specrun.runner.call_costs import WIDE, CallCosts
from specrun.runner.kv_cache import require_capacity
from specrun.runner.logits import FUSE, HostLogits, Timed
from specrun.runner.serving.batch import BatchCache, BatchEngine, RowEngine, SlotCall
from specrun.runner.serving.prefix_cache import PrefixCache
from specrun.runner.serving.scheduler import Scheduler
from specrun.runner.session import Output
from specrun.runner.session_ort import OrtLoader
from specrun.runner.tree import Ancestry

Array = np.ndarray[Any, Any]


class SlotSession:
    """One slot of a batched engine; as `Session`."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: BatchEngine,
        kv_cache: BatchCache,
        slot: int,
        vocabulary_size: int,
        ids: Array | None,
        timed: Timed,
    ) -> None:
        self._timed = timed
        self._scheduler, self._engine, self._cache, self._slot = scheduler, engine, kv_cache, slot
        self._vocabulary_size, self._ids = vocabulary_size, ids
        self._length = 0
        self._nodes = Ancestry()

    @property
    def capacity(self) -> int:
        return self._cache.capacity

    @property
    def length(self) -> int:
        return self._length

    @property
    def max_tokens(self) -> int:
        return self._cache.capacity

    @property
    def max_nodes(self) -> int:
        return self._cache.capacity

    def grow(self, tokens: Sequence[int], parents: Sequence[int], features: Array | None = None) -> Output:
        before = len(self._nodes)
        require_capacity(self._length + before + len(tokens), self._cache.capacity)
        depths, mask = self._nodes.add(parents)
        call = SlotCall(self._slot, tokens, depths, mask, self._length, before, features)
        logits, hidden = self._scheduler.wait(self._engine, call, len(tokens))
        rows = logits[:, : self._vocabulary_size].astype(np.float32, copy=False)
        return Output(HostLogits(rows, self._ids), None if hidden is None else hidden.astype(np.float32, copy=False))

    def keep(self, nodes: Sequence[int]) -> None:
        self._cache.gather(self._slot, self._length, nodes)
        self._length += len(nodes)
        self._nodes.clear()

    def truncate(self, length: int) -> None:
        # Not "<= self._length": an early exit takes over rows that the target wrote.
        self._length = length
        self._nodes.clear()

    def release(self) -> None:
        """Nothing of this slot is needed any more."""
        self.truncate(0)
        self._cache.written[self._slot] = 0

    def rows(self) -> dict[tuple[int, str], Array]:
        """A copy of the committed tokens' rows."""
        return self._cache.read(self._slot, self._length)

    def take_rows(self, rows: dict[tuple[int, str], Array], count: int) -> None:
        """Begin with the first `count` of `rows`, or all if they are fewer; without any other."""
        count = min(count, *(array.shape[1] for array in rows.values()))
        self._cache.write(self._slot, rows, count)
        self.truncate(count)


class Slots:
    """The engines and caches of a bundle, for several sequences."""

    def __init__(self, bundle: Bundle, count: int) -> None:
        self.count = count
        self._quantized = bundle.manifest.quantized
        self._widest = max(bundle.manifest.widths)
        self._caches: dict[str, BatchCache] = {}
        self._engines: dict[Path, BatchEngine] = {}
        self._target_file = bundle.engine(TARGET)
        self.scheduler = Scheduler(lambda: self._engines[self._target_file])
        self.costs = CallCosts()
        self._host = OrtLoader(no_single_rows=False, costs=self.costs)
        self.rows = cache(self._load_rows)

    def _load_rows(self, name: str, engine: Path, dtype: str) -> RowEngine:
        return RowEngine(self._host.rows(name, engine, dtype))

    def loader(self, slot: int) -> "SlotLoader":
        return SlotLoader(self, slot)

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> BatchCache:
        if name not in self._caches:
            self._caches[name] = BatchCache(signature, dtype, capacity, self.count, self._widest)
        return self._caches[name]

    def engine(self, name: str, file: Path, signature: Signature, kv_cache: BatchCache, dtype: str) -> BatchEngine:
        if file not in self._engines:
            no_single_rows = self._quantized and name == TARGET
            self._engines[file] = BatchEngine(file, signature, kv_cache, dtype, self.costs, name, no_single_rows)
        return self._engines[file]


class SlotLoader:
    """What `runner/loader.py` asks for, for one slot."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self._slots, self._slot = slots, slot
        self._sessions: dict[str, SlotSession] = {}

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> BatchCache:
        return self._slots.cache(name, signature, dtype, capacity)

    def target(
        self, engine: Path, signature: Signature, cache: BatchCache, dtype: str, vocabulary_size: int
    ) -> SlotSession:
        return self.draft(TARGET, engine, signature, cache, dtype, vocabulary_size)

    def draft(
        self,
        name: str,
        engine: Path,
        signature: Signature,
        cache: BatchCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
    ) -> SlotSession:
        opened = self._slots.engine(name, engine, signature, cache, dtype)
        session = SlotSession(
            self._slots.scheduler, opened, cache, self._slot, vocabulary_size, ids, self._slots.costs.observe
        )
        self._sessions[name] = session
        return session

    def release(self) -> None:
        """The sequence has ended."""
        for session in self._sessions.values():
            session.release()

    def remember(self, tokens: Sequence[int], kept: PrefixCache) -> None:
        """Keep the rows of a sequence that has ended. `tokens`: at least those that were read."""
        target = self._sessions[TARGET]
        if kept.enabled and target.length:
            # An early exit has no rows of its own.
            own = {name: session for name, session in self._sessions.items() if name != EARLY_EXIT and session.length}
            kept.put(tokens[: target.length], {name: session.rows() for name, session in own.items()})

    def recall(self, prompt: Sequence[int], kept: PrefixCache) -> int:
        """Begin with rows that hold for `prompt`; returns how many of its tokens need not be read."""
        found = kept.find(prompt)
        if found is None:
            return 0
        ended, count = found
        for name, rows in ended.rows.items():
            if name in self._sessions:
                self._sessions[name].take_rows(rows, count)
        return count

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], HostLogits]:
        run = self._rows(name, engine, dtype)
        return lambda hidden: HostLogits(run(hidden[None])[0, :, :vocabulary_size], ids, self._slots.costs.observe)

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]:
        return self._rows(FUSE, engine, dtype)

    def _rows(self, name: str, engine: Path, dtype: str) -> Callable[[Array], Array]:
        opened = self._slots.rows(name, engine, dtype)

        def run(hidden: Array) -> Array:
            if len(hidden) > WIDE:  # of a prompt: cheaper than waiting for others
                return opened.run(hidden)
            return np.asarray(self._slots.scheduler.wait(opened, hidden, len(hidden)))

        return run
