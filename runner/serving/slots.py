"""Slots: each holds one sequence in the caches that all share, and has a runner of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specrun.engines.backend import GPU_BACKENDS
from specrun.engines.manifest import DRAFT_MODEL, EARLY_EXIT, TARGET, Bundle
from specrun.engines.signature import Signature
from specrun.runner.call_costs import CallCosts
from specrun.runner.logits import Logits
from specrun.runner.serving.batch import HostMaker
from specrun.runner.serving.prefix_cache import PrefixCache
from specrun.runner.serving.scheduler import Scheduler
from specrun.runner.slot_session import SlotCache, SlotEngine, SlotSession

Array = np.ndarray[Any, Any]


class Maker(Protocol):
    """Makes what all slots share. Parameters as `Loader` has them."""

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> SlotCache: ...

    def engine(
        self,
        name: str,
        file: Path,
        signature: Signature,
        cache: Any,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None,
    ) -> SlotEngine: ...

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], Logits]: ...

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]: ...


class Slots:
    """The engines and caches of a bundle, for several sequences."""

    def __init__(self, bundle: Bundle, count: int, before_call: Callable[[], None] = lambda: None) -> None:
        """`before_call`: as `Scheduler` has it. Raises UnfitError, or an error of the backend."""
        self.count = count
        self._made: dict[Path | str, Any] = {}  # by file, and caches by the name of their model
        self._target_file = bundle.engine(TARGET)
        self.scheduler = Scheduler(lambda: self._made[self._target_file], before_call)
        self.costs = CallCosts()
        self.maker = self._open_maker(bundle)

    def _open_maker(self, bundle: Bundle) -> Maker:
        if bundle.manifest.backend in GPU_BACKENDS:
            from specrun.runner.cuda.loader import CudaMaker

            return CudaMaker.open(bundle, bundle.manifest.slots, self.costs)  # what its calls are for, used or not
        return HostMaker(bundle, self.count, self.costs, self.scheduler.wait)

    def loader(self, slot: int) -> "SlotLoader":
        return SlotLoader(self, slot)

    def once(self, key: Path | str, make: Callable[[], Any]) -> Any:
        """What `make` made the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class SlotLoader:
    """What `runner/loader.py` asks for, for one slot."""

    def __init__(self, slots: Slots, slot: int) -> None:
        self._slots, self._slot = slots, slot
        self._sessions: dict[str, SlotSession] = {}
        self._reused = 0  # tokens that need not be read
        self._lags: dict[str, int] = {}  # as in `Ended`

    def cache(self, name: str, signature: Signature, dtype: str, capacity: int) -> SlotCache:
        maker = self._slots.maker
        made: SlotCache = self._slots.once(name, lambda: maker.cache(name, signature, dtype, capacity))
        return made

    def target(
        self, engine: Path, signature: Signature, cache: SlotCache, dtype: str, vocabulary_size: int
    ) -> SlotSession:
        return self.draft(TARGET, engine, signature, cache, dtype, vocabulary_size)

    def draft(
        self,
        name: str,
        engine: Path,
        signature: Signature,
        cache: SlotCache,
        dtype: str,
        vocabulary_size: int,
        ids: Array | None = None,
    ) -> SlotSession:
        def make() -> SlotEngine:
            return self._slots.maker.engine(name, engine, signature, cache, dtype, vocabulary_size, ids)

        session = SlotSession(self._slots.scheduler.wait, self._slots.once(engine, make), cache, self._slot)
        self._sessions[name] = session
        return session

    def heads(
        self, name: str, engine: Path, shape: tuple[int, int, int], dtype: str, vocabulary_size: int, ids: Array | None
    ) -> Callable[[Array], Logits]:
        maker = self._slots.maker
        made: Callable[[Array], Logits] = self._slots.once(
            engine, lambda: maker.heads(name, engine, shape, dtype, vocabulary_size, ids)
        )
        return made

    def fuse(self, engine: Path, shape: tuple[int, int], dtype: str) -> Callable[[Array], Array]:
        maker = self._slots.maker
        made: Callable[[Array], Array] = self._slots.once(engine, lambda: maker.fuse(engine, shape, dtype))
        return made

    def release(self) -> None:
        """The sequence has ended."""
        self._reused = 0
        self._lags.clear()
        for session in self._sessions.values():
            session.release()

    def remember(self, tokens: Sequence[int], kept: PrefixCache) -> None:
        """Keep the rows of a sequence that has ended. `tokens`: at least those that were read."""
        target = self._sessions[TARGET]
        if kept.enabled and target.length:
            # An early exit has no rows of its own.
            own = {name: session for name, session in self._sessions.items() if name != EARLY_EXIT and session.length}
            # A head that was opened after the start has none of the rows before.
            lags = {name: self._lags.get(name, self._reused) for name in own if _is_head(name)}
            kept.put(tokens[: target.length], {name: session.rows() for name, session in own.items()}, lags)

    def recall(self, prompt: Sequence[int], kept: PrefixCache) -> int:
        """Begin with rows that hold for `prompt`; returns how many of its tokens need not be read."""
        found = kept.find(prompt)
        if found is None:
            return 0
        ended, count = found
        self._reused = count
        for name, session in self._sessions.items():
            lag = ended.lags.get(name, 0)
            if name in ended.rows:
                session.take_rows(ended.rows[name], count - lag)
            if _is_head(name):
                self._lags[name] = count - session.length
        return count


def _is_head(session: str) -> bool:
    """Whether it cannot read what it missed: it would need states that the target had then."""
    return session not in (TARGET, DRAFT_MODEL, EARLY_EXIT)
