"""The process of a worker: asked when it is its turn, stopped at all other times."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT = 900.0  # seconds for one answer


class WorkerError(Exception):
    """A worker cannot do what it was asked. One line, for the table."""


class WorkerGoneError(WorkerError):
    """A worker has ended; it cannot be asked again."""


class WorkerProcess:
    """A worker that was loaded. Between its turns the whole process stands still, threads that spin included."""

    def __init__(self, command: Sequence[str], directory: Path, log: Path, threads: int) -> None:
        """Start it and wait until it has loaded. Raises WorkerError."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            self.description = self._answer()
        except WorkerError:
            self.close()
            raise

    def ask(self, call: str, **arguments: Any) -> Any:
        """Let it run until it has answered. Raises WorkerError or WorkerGoneError."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which the missing answer tells
        return self._answer()

    def close(self) -> None:
        """End it. Safe to call twice."""
        self._process.kill()  # reaches a stopped process as well
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            reason = "the process ended" if ready else f"no answer in {TIMEOUT:g} s"
            self.close()
            raise WorkerGoneError(f"{reason}; {self._log.name}: {self._last_words()}")
        self._process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def _last_words(self) -> str:
        return (self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"])[-1]
