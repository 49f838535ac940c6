"""Kernels in a bundle: compiled without a GPU, for every architecture, and loaded on the right one only."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrun.engines.accept_kernels import (
    ARCHITECTURES,
    SOURCE,
    ArchitectureError,
    architecture_file,
    compile_kernels,
    compiler_options,
)
from specrun.engines.build_options import BuildOptions
from specrun.engines.errors import UnfitError
from specrun.engines.manifest import KERNELS, Bundle, BundleError
from specrun.runner.cuda.kernels import AcceptKernels
from tests import tiny

NAMES = [
    *("process_float32", "process_bfloat16", "process_float16", "summarize", "add_noise", "best"),
    *("walk", "probabilities", "reject", "gather_rows"),
]


@pytest.fixture(scope="module")
def gpu_bundle(tmp_path_factory: pytest.TempPathFactory, target_checkpoint: Path) -> Bundle:
    return tiny.make_bundle(tmp_path_factory.mktemp("gpu"), target_checkpoint, gpus=("sm75", "sm89"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_for(architecture: str) -> None:
    code = compile_kernels(architecture)
    assert code[:4] == b"\x7fELF"
    for name in NAMES:
        assert f".text.{name}".encode() in code


def test_nothing_is_fused() -> None:
    """A fused multiply-add rounds once where the reference rounds twice. Looks at the assembler text."""
    from cuda.bindings import nvrtc

    options = compiler_options("sm89").as_bytes("nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"accept.cu", 0, [], [])
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    assert b"mul.rn.f32" in text
    assert b"fma." not in text


def test_a_bundle_for_gpus_holds_their_kernels(gpu_bundle: Bundle) -> None:
    assert gpu_bundle.manifest.gpus == ("sm75", "sm89")
    for gpu in ("sm75", "sm89"):
        file = f"{KERNELS}/{architecture_file(gpu)}"
        assert (gpu_bundle.path / file).read_bytes() == compile_kernels(gpu)
        assert file in gpu_bundle.manifest.files


def test_edited_kernels_are_refused(gpu_bundle: Bundle) -> None:
    file = gpu_bundle.path / KERNELS / architecture_file("sm75")
    code = file.read_bytes()
    try:
        file.write_bytes(code[:-1] + b"?")
        with pytest.raises(BundleError, match="SHA-256"):
            Bundle.open(gpu_bundle.path)
    finally:
        file.write_bytes(code)


def test_another_gpu_is_refused(gpu_bundle: Bundle) -> None:
    device: Any = SimpleNamespace(arch="90")
    with pytest.raises(
        UnfitError, match=r"this GPU is sm90, .* was built for sm75, sm89; rebuild it with: .* --gpu sm90"
    ):
        AcceptKernels.of(gpu_bundle, device)


def test_unknown_architecture_is_refused_before_the_build(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="got GPU 'sm70', expected one of sm75"):
        BuildOptions("smollm2-135m", tmp_path, gpus=("sm70",))
