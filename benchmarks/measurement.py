"""All systems in turn, over all prompts, as often as asked; what was measured, raw."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, TypeVar

from benchmarks.bandwidth import read_bandwidth
from benchmarks.process import WorkerError, WorkerGoneError, WorkerProcess
from benchmarks.systems import PLAIN, Mode, System

CONTEXT = 256  # tokens before the calls that are timed one by one
WIDTHS = (1, 5, 9)  # tokens of these calls
CALLS = 5  # of each width, per repeat
PREFILL = 512  # tokens
WARM_UP = 4  # tokens generated once in each mode before anything is timed

Item = TypeVar("Item")
PromptSets = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Run:
    """One request."""

    prompt_set: str
    prompt: int
    repeat: int
    mode: str
    tokens: int
    seconds: float
    first_seconds: float | None
    steps: int | None
    same: bool | None  # the tokens of the plain run of this repeat; None: there is none to compare with


@dataclass
class SystemResult:
    """One system, as far as it could be measured."""

    name: str
    modes: list[str]
    error: str | None = None  # why there is nothing, or nothing more
    description: dict[str, Any] | None = None
    calls: dict[int, list[float]] = field(default_factory=lambda: {width: [] for width in WIDTHS})
    prefill: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    mode_errors: dict[str, str] = field(default_factory=dict)


@dataclass
class Subject:
    """A system that is being measured. Without a worker there is nothing to ask, or nothing any more."""

    system: System
    result: SystemResult
    worker: WorkerProcess | None = None

    def attempt(self, what: str, work: Callable[[WorkerProcess], Item]) -> Item | None:
        """Do `work`, or note why it cannot be done; what failed once is not tried again."""
        if self.worker is None or what in self.result.mode_errors:
            return None
        try:
            return work(self.worker)
        except WorkerError as error:
            self.result.mode_errors[what] = str(error)
            if isinstance(error, WorkerGoneError):
                self.result.error, self.worker = str(error), None
            return None


def measure(
    subjects: Sequence[Subject],
    sets: PromptSets,
    max_tokens: int,
    repeats: int,
    threads: int,
    bandwidths: list[float],
) -> Iterator[str]:
    """Fill in the subjects' results, and the memory bandwidth of each repeat, GB/s. Yields what is done meanwhile."""
    text = [token for prompts in sets.values() for prompt in prompts for token in prompt]
    text *= -(-1024 // len(text))
    for subject in subjects:
        for mode in subject.system.modes:
            _generate(subject, mode, text[:32], WARM_UP)
    for repeat in range(repeats):
        bandwidths.append(read_bandwidth(threads))
        for subject in _rotated(subjects, repeat):
            _time_calls(subject, text)
        yield f"repeat {repeat + 1} of {repeats}: calls"
        turn = 0
        for prompt_set, prompts in sets.items():
            for number, prompt in enumerate(prompts):
                for subject in _rotated(subjects, repeat + turn):
                    _time_request(subject, prompt_set, number, repeat, prompt, max_tokens)
                turn += 1
                yield f"repeat {repeat + 1} of {repeats}: {prompt_set}, prompt {number + 1} of {len(prompts)}"


def _time_calls(subject: Subject, text: list[int]) -> None:
    for width in WIDTHS:
        seconds = subject.attempt(
            f"calls of {width}",
            methodcaller("ask", "call_seconds", ids=text, context=CONTEXT, width=width, repeats=CALLS),
        )
        subject.result.calls[width] += seconds or []
    seconds = subject.attempt("prefill", lambda worker: worker.ask("prefill_seconds", ids=text[:PREFILL]))
    subject.result.prefill += [] if seconds is None else [seconds]


def _time_request(
    subject: Subject, prompt_set: str, number: int, repeat: int, prompt: list[int], max_tokens: int
) -> None:
    """One prompt in all modes, another one first in each repeat: the first finds caches cold."""
    found = {
        mode.name: answer
        for mode in _rotated(subject.system.modes, repeat)
        if (answer := _generate(subject, mode, prompt, max_tokens)) is not None
    }
    plain = found.get(PLAIN)
    for mode, answer in found.items():
        subject.result.runs.append(
            Run(
                prompt_set=prompt_set,
                prompt=number,
                repeat=repeat,
                mode=mode,
                tokens=len(answer["ids"]),
                seconds=answer["seconds"],
                first_seconds=answer["first_seconds"],
                steps=answer["steps"],
                same=None if plain is None else answer["ids"] == plain["ids"],
            )
        )


def _generate(subject: Subject, mode: Mode, prompt: list[int], max_tokens: int) -> dict[str, Any] | None:
    return subject.attempt(
        mode.name,
        lambda worker: worker.ask("generate", ids=prompt, max_tokens=max_tokens, settings=mode.settings),
    )


def _rotated(items: Sequence[Item], by: int) -> Iterator[Item]:
    """All of them, another one first each time."""
    start = by % len(items)
    yield from items[start:]
    yield from items[:start]
