"""The one model, in the format of each system and precision, made once."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.environment import ROOT, PreparationError, run
from benchmarks.systems import SPECRUN, System
from specrun.export import builtin
from specrun.runner.commands.build import downloads

NAME = "smollm2-135m"
WORK = ROOT / "build" / "peers"
MODELS = WORK / "models"
BUNDLES = {"fp32": ROOT / "build" / "bundles" / NAME, "int8": ROOT / "build" / "bundles" / f"{NAME}-int8"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
OPENVINO_INT4 = ["--group-size", "64", "--ratio", "1.0"]  # 128, the default, does not divide 576 columns


def model_of(system: System, python: Path) -> Path:
    """The model that `system` loads, converted by `python` if it is not there. Raises PreparationError."""
    match system.peer:
        case "transformers":
            return checkpoint()
        case "onnxruntime-genai":
            return _onnx(system, python)
        case "openvino":
            return _openvino(system, python)
        case "llama-cpp":
            return _gguf(system.precision, python)
    assert system.peer == SPECRUN
    path = BUNDLES[system.precision]
    if not path.is_dir():
        raise PreparationError(f"there is no bundle at {path.relative_to(ROOT)}: make peers builds it")
    return path


def checkpoint() -> Path:
    """The model as a Hugging Face folder. Raises PreparationError."""
    return _made(NAME, lambda out: run([sys.executable, "-m", "benchmarks.checkpoint", str(out)]))


def _onnx(system: System, python: Path) -> Path:
    command = [str(python), "-m", "onnxruntime_genai.models.builder", "-i", str(checkpoint())]
    command += ["-p", system.precision, "-e", "cpu", "-c", str(WORK / "cache"), "-o"]
    return _made(system.file_name, lambda out: run([*command, str(out)], **OFFLINE))


def _openvino(system: System, python: Path) -> Path:
    precision = "fp32" if system.precision == "bf16" else system.precision  # bf16: the same file, another arithmetic
    command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(checkpoint())]
    command += ["--task", "text-generation-with-past", "--weight-format", precision]
    command += OPENVINO_INT4 if precision == "int4" else []
    return _made(f"{system.peer}-{precision}", lambda out: run([*command, str(out)], **OFFLINE))


def _gguf(precision: str, python: Path) -> Path:
    """From the file that the checkpoint comes from: first without quantization, then in the precision asked for."""
    source = builtin.fetch(NAME, downloads() / NAME) if precision == "f32" else _gguf("f32", python)
    command = [str(python), "-m", "benchmarks.gguf_file", str(source)]
    return _made(f"{NAME}-{precision}.gguf", lambda out: run([*command, str(out), precision]))


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """What `make` leaves at the path that it is given, whole or not at all."""
    path, partial = MODELS / name, MODELS / f"partial-{name}"
    if path.exists():
        return path
    MODELS.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    make(partial)
    partial.rename(path)
    return path
