"""On a machine with a GPU (`make gpu`): bundles of every backend that it has, built, run and compared with the CPU."""

import dataclasses
from pathlib import Path

import pytest

from specrun.engines.accept_kernels import architecture_here
from specrun.engines.backend import ORT, ORT_CUDA, TENSORRT, TENSORRT_RTX
from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import Bundle
from specrun.runner.backend_comparison import compare_backends
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from tests import tiny, tiny_heads

pytestmark = pytest.mark.gpu

TEXT = "the sun rose over the sea, and the wind came from the land. " * 4
SETTINGS = [
    *((ORT_CUDA, "fp32"), (ORT_CUDA, "fp16"), (TENSORRT_RTX, "fp16"), (TENSORRT_RTX, "int8")),
    *((TENSORRT, "fp16"), (TENSORRT, "int8")),
]


def build(directory: Path, checkpoint: Path, backend: str, precision: str, gpus: tuple[str, ...]) -> Bundle:
    # Heads of 16 columns and more: TensorRT's attention wants them.
    draft = tiny.llama(num_hidden_layers=1, num_attention_heads=2, hidden_size=32, max_position_embeddings=96)
    return tiny.make_bundle(
        directory,
        checkpoint,
        tiny_heads.medusa(directory / "medusa"),
        tiny_heads.eagle3(directory / "eagle3"),
        "early-exit:6",
        tiny.save_checkpoint(directory / "draft", tiny.make_model(draft, seed=1, sharpness=12.0)),
        nodes=9,
        backend=backend,
        precision=precision,
        gpus=gpus,
        accept_quality_loss=True,
    )


@pytest.fixture(scope="module", params=SETTINGS, ids="-".join)
def gpu_runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path
) -> Runner:
    backend, precision = request.param
    here = architecture_here()
    assert here is not None, "no GPU"
    try:
        return Runner(build(tmp_path_factory.mktemp(backend), deep_checkpoint, backend, precision, (here,)))
    except SpecrunError as error:
        pytest.skip(f"not on this machine: {error}")


def test_logits_are_those_of_the_cpu(
    gpu_runner: Runner, tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path
) -> None:
    cpu = Runner(build(tmp_path_factory.mktemp("cpu"), deep_checkpoint, ORT, "fp32", ()))
    (found,) = compare_backends([cpu, gpu_runner], [cpu.encode(TEXT)])
    print(gpu_runner.bundle.manifest.backend, gpu_runner.bundle.manifest.precision, found)
    tolerance = {"fp32": 1e-3, "fp16": 3e-2, "int8": 0.5}[gpu_runner.bundle.manifest.precision]
    assert found.largest_difference < tolerance * found.largest_logit


@pytest.mark.parametrize("sampling", [Sampling(seed=1), Sampling(1.0, top_p=0.9, seed=2)], ids=["greedy", "sampled"])
def test_speculative_output_equals_plain_output(gpu_runner: Runner, sampling: Sampling) -> None:
    request = Request(gpu_runner.encode(TEXT), max_tokens=40, sampling=sampling)
    plain = gpu_runner.generate(request.plain()).ids
    for proposer in gpu_runner.proposers:
        for k in (1, 3, 8):
            assert gpu_runner.generate(dataclasses.replace(request, proposer=proposer, k=k)).ids == plain, (proposer, k)


def test_the_same_request_gives_the_same_tokens(gpu_runner: Runner) -> None:
    """Before, while and after CUDA graphs are captured."""
    request = Request(gpu_runner.encode(TEXT), max_tokens=20, sampling=Sampling(1.0, seed=3))
    assert len({gpu_runner.generate(request).ids for _ in range(5)}) == 1
