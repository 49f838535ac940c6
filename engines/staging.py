"""Write a directory somewhere else, then put it in place in one step, or leave nothing."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from specrun.engines.errors import SpecrunError


class OutputError(SpecrunError):
    """The output path cannot be used."""


@contextlib.contextmanager
def staged_directory(out: Path, marker: str) -> Iterator[Path]:
    """A fresh directory beside `out` that becomes `out` when the block succeeds.

    An existing `out` is replaced only if it is empty or holds a file called `marker`, the sign that specrun
    wrote it. On any error, interrupt or SIGTERM the staging directory is removed and `out` stays as it was.

    Raises OutputError.
    """
    if out.exists() and not (out.is_dir() and ((out / marker).is_file() or not any(out.iterdir()))):
        raise OutputError(f"{out} exists and was not written by specrun (it has no {marker}); choose another output")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot create {out.parent}: {error.strerror}; choose another output") from error
    _remove_abandoned(out)
    staging = out.parent / f"{_prefix(out)}{os.getpid()}"
    staging.mkdir()
    try:
        with _terminate_as_interrupt():
            yield staging
        _swap(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _prefix(out: Path) -> str:
    return f".{out.name}.building-"


def _swap(staging: Path, out: Path) -> None:
    """Rename cannot replace a directory that is not empty, so the old one steps aside for a moment."""
    old = staging.with_name(staging.name + "-old")
    if out.exists():
        out.rename(old)
    staging.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(out: Path) -> None:
    """Clear what a killed build of the same output left: its process is gone."""
    for path in out.parent.glob(f"{_prefix(out)}*"):
        owner = path.name.removeprefix(_prefix(out)).removesuffix("-old")
        if owner.isdigit() and not _is_running(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, as another user
        return True
    return True


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that `finally` blocks run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
