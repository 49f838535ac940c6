"""What a worker is: one loaded system, asked over stdin, answering over stdout, a JSON object per line.

A worker runs in its system's own environment, so this file needs nothing but the standard library.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

Settings = dict[str, Any]  # how to speculate, in the system's own words; empty: plain decoding


@dataclass(frozen=True)
class Description:
    """What was loaded."""

    version: str
    weight_bytes: int  # that a call of one token reads
    notes: dict[str, str]  # settings that the system chose itself


@dataclass(frozen=True)
class Generation:
    """One request, greedy."""

    ids: list[int]
    seconds: float  # from the request to the last token
    first_seconds: float | None  # to the first token, where the system tells
    steps: int | None  # calls of the model that gave tokens, the prompt's included, where the system tells


class Worker(ABC):
    """A loaded system."""

    @abstractmethod
    def __init__(self, model: Path, precision: str, threads: int, stop: int | None) -> None:
        """Load. `stop`: the token that ends a generation; None: nothing does."""

    @abstractmethod
    def describe(self) -> Description:
        """What was loaded."""

    @abstractmethod
    def generate(self, ids: list[int], max_tokens: int, settings: Settings) -> Generation:
        """What follows the prompt `ids`: `max_tokens` tokens, or fewer where one of them ends it."""

    @abstractmethod
    def start(self, ids: list[int]) -> None:
        """Forget everything and read `ids`; compute what the next token needs, no more."""

    @abstractmethod
    def call(self, ids: list[int]) -> None:
        """Read `ids` after what was read before, in one call, with the logits of every one of them."""

    def prefill_seconds(self, ids: list[int]) -> float:
        """How long `start` takes."""
        return _timed(lambda: self.start(ids))

    def call_seconds(self, ids: list[int], context: int, width: int, repeats: int) -> list[float]:
        """How long calls of `width` tokens take, one after the other, from `context` tokens on.

        The first one, in which buffers for this width are made, is not among them.
        """
        self.start(ids[:context])
        pieces = [ids[begin : begin + width] for begin in range(context, context + width * (repeats + 1), width)]
        return [_timed(partial(self.call, piece)) for piece in pieces][1:]


def timed_generation(ids: Iterator[int]) -> tuple[list[int], float, float]:
    """Collect a stream of tokens: the tokens, seconds to the last one, seconds to the first one."""
    begin = time.perf_counter()
    found = [next(ids)]
    first = time.perf_counter() - begin
    found += ids
    return found, time.perf_counter() - begin, first


def main(load: Callable[[Path, str, int, int | None], Worker]) -> None:
    """Load the worker that the command line asks for and answer until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not look like an answer
    try:
        model, precision, threads, stop = sys.argv[1:]
        worker = load(Path(model), precision, int(threads), int(stop) if stop else None)
        _answer(answers, asdict(worker.describe()))
    except Exception as error:
        _answer(answers, error)
        raise
    for line in sys.stdin:
        question = json.loads(line)
        try:
            _answer(answers, _result(worker, question.pop("call"), question))
        except Exception as error:  # whatever a system raises is its result
            _answer(answers, error)


def _result(worker: Worker, call: str, arguments: dict[str, Any]) -> Any:
    match call:
        case "generate":
            return asdict(worker.generate(**arguments))
        case "prefill_seconds":
            return worker.prefill_seconds(**arguments)
        case "call_seconds":
            return worker.call_seconds(**arguments)
    raise ValueError(f"no call {call!r}")


def _answer(answers: Any, answer: Any) -> None:
    if isinstance(answer, Exception):
        line = (str(answer).strip().splitlines() or [""])[0]
        found = {"error": f"{type(answer).__name__}: {line}"}
    else:
        found = {"result": answer}
    print(json.dumps(found), file=answers, flush=True)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
