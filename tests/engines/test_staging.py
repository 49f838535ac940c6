"""Output appears whole or not at all."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from specrun.engines.staging import OutputError, staged_directory


def contents(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_success_replaces_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    for text in ("first", "second"):
        with staged_directory(out, "marker") as directory:
            (directory / "marker").write_text(text)
    assert (out / "marker").read_text() == "second"
    assert contents(out.parent) == ["out"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failure_leaves_the_old_output(error: type[BaseException], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_directory(out, "marker") as directory:
        (directory / "marker").write_text("old")

    def fail() -> None:
        with staged_directory(out, "marker") as directory:
            (directory / "marker").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert (out / "marker").read_text() == "old"
    assert contents(tmp_path) == ["out"]


def test_foreign_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(OutputError, match="not written by specrun"), staged_directory(tmp_path, "marker"):
        pass
    with pytest.raises(OutputError), staged_directory(tmp_path / "thesis.txt", "marker"):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "precious"


CHILD = """
    import pathlib, sys
    from specrun.engines.staging import staged_directory
    with staged_directory(pathlib.Path(sys.argv[1]), "marker") as directory:
        (directory / "half").write_text("written")
        print("ready", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_terminated_process_leaves_nothing(signal_number: int, tmp_path: Path) -> None:
    with _child(tmp_path / "out") as child:
        child.send_signal(signal_number)
        assert child.wait(60) != 0
    assert contents(tmp_path) == []


def test_killed_process_is_cleaned_up_by_the_next_build(tmp_path: Path) -> None:
    with _child(tmp_path / "out") as child:
        child.kill()
        child.wait(60)
    assert contents(tmp_path) != []
    with staged_directory(tmp_path / "out", "marker") as directory:
        assert contents(tmp_path) == [directory.name]


def test_running_build_is_not_cleaned_up(tmp_path: Path) -> None:
    running = tmp_path / f".out.building-{os.getppid()}"
    running.mkdir()
    with staged_directory(tmp_path / "out", "marker"):
        assert running.is_dir()


def _child(out: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(out)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child
