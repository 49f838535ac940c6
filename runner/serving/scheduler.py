"""Runs many generations in one thread: each goes on until it needs an engine, then one call serves all that wait.

Generations are greenlets. Their code (the loop, the proposers) is the same as for a single request; only their sessions
hand over to the scheduler where they would call an engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import greenlet

from specrun.runner.call_costs import WIDE


class SharedEngine(Protocol):
    """An engine that serves several in one call."""

    def together(self, calls: Any) -> int:
        """How many of the first `calls` it can serve in one; at least 1."""

    def call(self, calls: Any) -> Any:
        """What each gets, valid until the next call."""


@dataclass(frozen=True, eq=False)  # one is as good as its identity, and that compares fast
class Waiting:
    """A generation that waits for an engine."""

    task: "greenlet.greenlet"
    engine: SharedEngine
    call: Any  # what the engine takes
    width: int


class Scheduler:
    """Not thread-safe: all of it belongs to one thread."""

    def __init__(self, target: Callable[[], SharedEngine], before_call: Callable[[], None]) -> None:
        """`target`: the engine that verifies; its calls wait until no draft is at work, so that they can be joined.
        `before_call`: is called before each of its calls."""
        self._target = target
        self._before_call = before_call
        self._main = greenlet.getcurrent()
        self._waiting: list[Waiting] = []  # the longest waiting first
        self._meeting: list[greenlet.greenlet] = []

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._meeting)

    def spawn(self, run: Callable[[], Any]) -> "greenlet.greenlet":
        """Start a generation; it runs up to its first engine call."""
        task = greenlet.greenlet(run, parent=self._main)
        task.switch()
        return task

    def cancel(self, task: "greenlet.greenlet", error: BaseException) -> None:
        """End a generation: `error` is raised where it waits."""
        self._waiting = [each for each in self._waiting if each.task is not task]
        self._meeting = [each for each in self._meeting if each is not task]
        if not task.dead:
            task.throw(error)

    def wait(self, engine: SharedEngine, call: Any, width: int) -> Any:
        """For a generation: what `engine` makes of `call`, which has `width` rows. Others run meanwhile."""
        self._waiting.append(Waiting(greenlet.getcurrent(), engine, call, width))
        return self._main.switch()

    def meet(self) -> None:
        """For a generation: wait until no draft is at work, so until all have their guesses. Those that met go on one
        after another, before anything else is done."""
        self._meeting.append(greenlet.getcurrent())
        self._main.switch()

    def step(self) -> None:
        """One engine call for everyone who can share it, and what follows from it; then a piece of a prompt, so that
        prompts and answers get their turns."""
        drafts = [each for each in self._narrow() if each.engine is not self._target()]
        if not drafts:
            met, self._meeting = self._meeting, []
            for task in met:
                if not task.dead:
                    task.switch()
        first = (drafts or self._narrow())[:1]
        if first:
            self._run([each for each in self._narrow() if each.engine is first[0].engine])
        wide = next((each for each in self._waiting if each.width > WIDE), None)
        if wide is not None and not drafts:
            self._run([wide])

    def _narrow(self) -> list[Waiting]:
        return [each for each in self._waiting if each.width <= WIDE]

    def _run(self, group: list[Waiting]) -> None:
        """Serve as many of `group`, who wait for the same engine, as one call can."""
        group = group[: group[0].engine.together([each.call for each in group])]
        self._waiting = [each for each in self._waiting if each not in group]
        if group[0].engine is self._target():
            self._before_call()
        try:
            results = group[0].engine.call([each.call for each in group])
        except Exception as error:  # whatever an engine raises ends the generations that asked, and no other
            for each in group:
                each.task.throw(error)
            return
        for each, result in zip(group, results, strict=True):
            if not each.task.dead:
                each.task.switch(result)
