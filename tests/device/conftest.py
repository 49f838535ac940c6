"""Bundles for a GPU on the stand-in driver, and the same on ONNX Runtime's CPU provider."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrun.engines import compiler, tensorrt
from specrun.engines.backend import ORT_CUDA, TENSORRT_RTX
from specrun.engines.manifest import Bundle
from specrun.engines.ort import load_engine
from specrun.runner.cuda import engine_ort, row_sampler
from specrun.runner.runner import Runner
from tests import tiny, tiny_heads
from tests.device import stand_in_tensorrt
from tests.kernels.driver import load_stand_in

CAPACITY = 160


def make(directory: Path, target: Path, draft: Path, **options: Any) -> Bundle:
    """A target with one draft of every kind."""
    drafts: list[Path | str] = [
        tiny_heads.medusa(directory / "medusa"),
        tiny_heads.eagle1(directory / "eagle1"),
        tiny_heads.eagle3(directory / "eagle3"),
        "early-exit:6",
        draft,
    ]
    return tiny.make_bundle(directory, target, *drafts, nodes=9, k=3, capacity=CAPACITY, **options)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """The stand-ins of driver and libraries instead of the real ones, and small blocks: their threads are fibers."""
    load_stand_in()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "build_engine", stand_in_tensorrt.build_engine)
        patch.setattr(tensorrt, "MODULES", {TENSORRT_RTX: stand_in_tensorrt.__name__})
        patch.setattr(engine_ort, "load_cuda_engine", lambda path, stream: load_engine(path))
        patch.setattr(engine_ort, "DEVICE", "cpu")
        patch.setattr(row_sampler, "THREADS", 32)
        patch.setattr(row_sampler, "CHUNKS", 1)
        yield


@pytest.fixture(autouse=True, scope="module")
def stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the tests of this folder, but not for those that want a GPU, and not for other folders."""
    if request.module.__name__.endswith("test_gpu"):
        yield
        return
    with stand_ins():
        yield


@pytest.fixture(scope="session", params=[(TENSORRT_RTX, "fp16"), (ORT_CUDA, "fp32")], ids=[TENSORRT_RTX, ORT_CUDA])
def device_bundle(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    deep_checkpoint: Path,
    draft_checkpoint: Path,
) -> Bundle:
    backend, precision = request.param
    options = {"backend": backend, "precision": precision, "gpus": ("sm86", "sm89")}
    with stand_ins():
        return make(tmp_path_factory.mktemp(backend), deep_checkpoint, draft_checkpoint, **options)


@pytest.fixture(scope="session")
def device_runner(device_bundle: Bundle) -> Runner:
    with stand_ins():
        return Runner(device_bundle)


@pytest.fixture(scope="session")
def reference_runner(
    device_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path, draft_checkpoint: Path
) -> Runner:
    """On the CPU, at the same precision."""
    directory = tmp_path_factory.mktemp("reference")
    return Runner(make(directory, deep_checkpoint, draft_checkpoint, precision=device_bundle.manifest.precision))
