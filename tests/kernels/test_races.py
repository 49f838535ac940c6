"""The kernels under the thread sanitizer."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.driver import compile_cpp


def sanitize(directory: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    program = compile_cpp(
        "race_check.cpp", directory / "race_check", "-g", "-O1", "-fsanitize=thread", "-pthread", *options
    )
    # The sanitizer of older compilers finds no room for its shadow memory where addresses are randomized widely.
    fixed_addresses = [setarch, "-R"] if (setarch := shutil.which("setarch")) else []
    return subprocess.run(
        [*fixed_addresses, str(program)],
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_two_threads_touch_the_same_memory_unordered(tmp_path: Path) -> None:
    done = sanitize(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("then token") == 4


@pytest.mark.parametrize("broken", ["-DSHIM_NO_BARRIERS", "-DSHIM_PLAIN_ATOMICS"])
def test_a_missing_barrier_or_atomic_is_noticed(broken: str, tmp_path: Path) -> None:
    done = sanitize(tmp_path, broken)
    assert "data race" in done.stderr
    assert done.returncode != 0
