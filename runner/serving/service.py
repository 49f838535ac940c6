"""The engine room of a server: one thread that runs generations in slots, and how others talk to it."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from specrun.engines.backend import GPU_BACKENDS
from specrun.engines.errors import RequestError, SpecrunError, UnfitError
from specrun.engines.manifest import Bundle
from specrun.runner.call_costs import WIDEST_TIMED
from specrun.runner.grammar import GrammarError
from specrun.runner.kv_cache import CapacityError
from specrun.runner.pace import Pace, Trace
from specrun.runner.runner import Event, Request, Runner
from specrun.runner.serving.prefix_cache import PrefixCache
from specrun.runner.serving.slots import SlotLoader, Slots
from specrun.runner.session import Session
from specrun.runner.statistics import Statistics

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.5  # how long the thread sleeps at most while nothing runs; new work wakes it


CPU_SLOTS = 8
WARM_UP = Request((1, 2, 3, 1, 2, 3), max_tokens=8)
WARM_UP_WIDTHS = (1, 2, 4, 8, 16)


class BusyError(SpecrunError):
    """The queue is full."""


class StoppedError(SpecrunError):
    """The server is shutting down."""


class CancelledError(Exception):
    """Raised in a generation whose client went away."""


class DeadlineError(SpecrunError):
    """A request took longer than it may."""


# What a client can mend; any other error is the server's.
CLIENT_ERRORS = (RequestError, GrammarError, CapacityError, UnfitError)

# What a generation's owner gets: an event, or the error that ended it. Called in the engine's thread.
Sink = Callable[[Event | BaseException], None]


@dataclass(eq=False)
class Generation:
    """A request on its way."""

    request: Request
    sink: Sink
    deadline: float  # by time.monotonic()
    statistics: Statistics = field(default_factory=Statistics)
    slot: int | None = None
    task: Any = None
    ended: bool = False


@dataclass(frozen=True)
class Load:
    """What goes on, for metrics."""

    running: int
    waiting: int
    slots: int


def _read(session: Session, width: int) -> None:
    session.truncate(0)
    session.grow([1] * width, range(-1, width - 1))
    session.truncate(0)


class Service:
    """Runs requests side by side. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        bundle: Bundle,
        slots: int | None,
        queue_size: int,
        prefix_bytes: int = 1 << 30,
        trace: Trace | None = None,
    ) -> None:
        """`slots`: requests that run at the same time; None: as many as the engines serve in one call, on a CPU
        CPU_SLOTS. `prefix_bytes`: for rows of sequences that have ended; 0: nothing is reused. `trace`: gets every
        decision on how far to speculate.

        Raises UnfitError for bundles that it cannot serve, or an error of the engine."""
        on_gpu = bundle.manifest.backend in GPU_BACKENDS
        if slots is None:
            slots = bundle.manifest.slots if on_gpu else CPU_SLOTS
        if on_gpu and slots > bundle.manifest.slots:
            gpus = " ".join(f"--gpu {gpu}" for gpu in bundle.manifest.gpus)
            raise UnfitError(
                f"got {slots} slots, the engines of {bundle.path} serve {bundle.manifest.slots} requests in one call; "
                f"rebuild it with: {bundle.manifest.command} {gpus} --slots {slots}"
            )
        self.bundle = bundle
        self.queue_size = queue_size
        self._slots_count = slots
        self._trace = trace
        self.prefixes = PrefixCache(prefix_bytes)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._unsent: list[tuple[Generation, Event | BaseException]] = []
        self._accepting = True
        self._stopping = False
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Load engines and warm up. Raises what went wrong."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @classmethod
    def open(
        cls, path: Path, slots: int | None, queue_size: int, prefix_bytes: int = 1 << 30, trace: Trace | None = None
    ) -> "Service":
        """Check, load and warm up the bundle at `path`."""
        service = cls(Bundle.open(path), slots, queue_size, prefix_bytes, trace)
        service.start()
        return service

    @property
    def runner(self) -> Runner:
        """For tokenizer, chat template and checks of requests; not for generating."""
        return self._base

    @property
    def pace(self) -> Pace:
        return self._pace

    @property
    def load(self) -> Load:
        return Load(len(self._running), len(self._waiting), self._slots_count)

    @property
    def accepting(self) -> bool:
        return self._accepting

    def submit(self, request: Request, sink: Sink, timeout: float) -> Generation:
        """Queue a request. Raises BusyError if too many wait, StoppedError while shutting down, RequestError."""
        if not self._accepting:
            raise StoppedError("the server is shutting down")
        if len(self._waiting) >= self.queue_size + max(0, self._slots_count - len(self._running)):
            raise BusyError(f"all slots are busy, and {len(self._waiting)} requests wait already; try again later")
        self._base.check(request)
        generation = Generation(request, sink, time.monotonic() + timeout)
        # Counted at once, so that a burst cannot outrun the engine's thread.
        self._waiting.append(generation)
        self._inbox.put(lambda: None)
        return generation

    def cancel(self, generation: Generation) -> None:
        """The client is gone: free the slot."""
        self._inbox.put(lambda: self._end(generation, CancelledError("cancelled")))

    def stop(self, drain_seconds: float) -> bool:
        """Take no more requests, let the running ones finish, end the thread. Returns whether all finished."""
        self._accepting = False
        deadline = time.monotonic() + drain_seconds
        while (self._running or self._waiting) and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        finished = not (self._running or self._waiting)
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout=10)
        return finished

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            self._load()
        except BaseException as error:
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        while not self._stopping:
            self._read_inbox()
            self._end_overdue()
            self._start_waiting()
            if not self._slots.scheduler.idle:
                self._slots.scheduler.step()
            if self._slots.scheduler.idle:
                self._send()
        for generation in [*self._running, *self._waiting]:
            self._end(generation, StoppedError("the server stopped before the request was finished"))
        self._send()

    def _send(self) -> None:
        """Hand over what was decided. It is done at once for all, just before the target computes: whoever gets it
        wakes up, and would take the interpreter from the one that has the next call to make ready."""
        unsent, self._unsent = self._unsent, []
        for generation, event in unsent:
            try:
                generation.sink(event)
            except Exception as error:  # of one client; the others must not notice
                logger.error("an answer could not be handed over: %s", error, exc_info=error)
                self.cancel(generation)

    def _load(self) -> None:
        self._slots = Slots(self.bundle, self._slots_count, self._send)
        self._pace = Pace(self._slots.costs, self._slots.scheduler.meet, self._trace)
        self._loaders: list[SlotLoader] = [self._slots.loader(slot) for slot in range(self._slots_count)]
        self._base = Runner(self.bundle, self._loaders[0], self._pace)
        self._runners = [self._base, *(self._base.beside(loader) for loader in self._loaders[1:])]
        self._free = list(range(self._slots_count))
        self._warm_up()
        self._pace.forget_outcomes()

    def _warm_up(self) -> None:
        """Calls of many sizes, plain and speculative rounds, so that the first request finds all loaded and
        measured."""
        for width in WARM_UP_WIDTHS:
            batch = 1
            while batch <= self._slots_count and batch * width <= WIDEST_TIMED:
                for _ in range(3):
                    for runner in self._runners[:batch]:
                        self._slots.scheduler.spawn(partial(_read, runner.target, width))
                    while not self._slots.scheduler.idle:
                        self._slots.scheduler.step()
                batch *= 2
        batch = 1
        while batch <= self._slots_count:
            for request in (WARM_UP, replace(WARM_UP, k=3), WARM_UP.plain()):
                for runner in self._runners[:batch]:
                    self._slots.scheduler.spawn(partial(runner.generate, request))
                while not self._slots.scheduler.idle:
                    self._slots.scheduler.step()
                for loader in self._loaders[:batch]:
                    loader.release()
            batch *= 2

    def _read_inbox(self) -> None:
        idle = self._slots.scheduler.idle and not self._waiting
        try:
            (self._inbox.get(timeout=IDLE_SECONDS) if idle else self._inbox.get_nowait())()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _start_waiting(self) -> None:
        while self._waiting and self._free:
            generation = self._waiting.popleft()
            if generation.ended:
                continue
            generation.slot = min(self._free)
            self._free.remove(generation.slot)
            self._running.append(generation)
            generation.task = self._slots.scheduler.spawn(partial(self._generate, generation))

    def _generate(self, generation: Generation) -> None:
        """Runs as a greenlet."""
        assert generation.slot is not None
        error: BaseException | None = None
        loader, request = self._loaders[generation.slot], generation.request
        tokens = list(request.prompt_ids)
        try:
            reused = loader.recall(tokens, self.prefixes) if request.cache_prompt else 0
            for event in self._runners[generation.slot].stream(request, generation.statistics, reused=reused):
                tokens.append(event.token.id)
                self._unsent.append((generation, event))
            if request.cache_prompt:
                loader.remember(tokens, self.prefixes)
        except BaseException as raised:
            error = raised
        self._finish(generation)
        if error is not None and not isinstance(error, CancelledError):
            if not isinstance(error, (*CLIENT_ERRORS, StoppedError, DeadlineError)):
                logger.error("a generation failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._unsent.append((generation, error))

    def _end(self, generation: Generation, error: BaseException) -> None:
        if generation.ended:
            return
        if generation.task is None:
            generation.ended = True
            if generation in self._waiting:
                self._waiting.remove(generation)
            if not isinstance(error, CancelledError):
                self._unsent.append((generation, error))
            return
        self._slots.scheduler.cancel(generation.task, error)

    def _finish(self, generation: Generation) -> None:
        assert generation.slot is not None
        generation.ended = True
        self._running.remove(generation)
        self._loaders[generation.slot].release()
        self._free.append(generation.slot)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for generation in [*self._running, *self._waiting]:
            if now > generation.deadline:
                self._end(generation, DeadlineError("the request took longer than it may"))
