"""A virtual environment for each peer, made once."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.systems import SPECRUN, usable_cores

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venv" / "peers"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
COMPILE = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(usable_cores())}
# A requirement of optimum-intel that text models do without; the one on PyPI fits PyTorch's CUDA build only.
UNWANTED = {"openvino": "torchvision"}


class PreparationError(Exception):
    """An environment or a model cannot be made. One line, for the table."""


def python_of(peer: str) -> Path:
    """The Python that runs `peer`, its environment made first if it is not there or its requirements changed.

    Raises PreparationError.
    """
    if peer == SPECRUN:
        return Path(sys.executable)
    directory, requirements = ENVIRONMENTS / peer, REQUIREMENTS / f"{peer}.txt"
    python, stamp = directory / "bin" / "python", directory / ".created"
    wanted = requirements.read_text(encoding="utf-8")
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    run([sys.executable, "-m", "venv", "--clear", str(directory)])
    run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], **COMPILE)
    if peer in UNWANTED:
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", UNWANTED[peer]])
    stamp.write_text(wanted, encoding="utf-8")
    return python


def run(command: list[str], **variables: str) -> None:
    """Run a command, its output on stderr. Raises PreparationError with the last line that it wrote."""
    print("$", " ".join(command), file=sys.stderr, flush=True)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, end="", file=sys.stderr, flush=True)
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["no message"])[-1]
        raise PreparationError(f"{Path(command[0]).name} {' '.join(command[1:4])} failed: {last}")
