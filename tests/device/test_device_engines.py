"""How calls are bound and queued: profiles, graphs, aliased caches; and the cache itself."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from specrun.engines.backend import TENSORRT_RTX
from specrun.engines.manifest import Bundle
from specrun.engines.signature import Signature, present
from specrun.engines.tensorrt import TensorRtError, load_engine
from specrun.runner.cuda.engine import TOKENS, Tensor
from specrun.runner.cuda.engine_tensorrt import TensorRtEngine
from specrun.runner.cuda.gpu import Gpu
from specrun.runner.cuda.kv_cache import DeviceKVCache
from specrun.runner.kv_cache import KVCache
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from tests import tiny
from tests.device import stand_in_tensorrt
from tests.kernels.driver import Driver

SIGNATURE = Signature(num_layers=2, kv_heads=3, head_dim=4, vocab_size=8, hidden_size=8)


@pytest.fixture(scope="module")
def gpu(stand_in: None) -> Gpu:
    driver = Driver.of_stand_in()
    return Gpu(driver.device, driver.stream, driver.kernels)


@pytest.fixture(scope="module")
def rtx_bundle(stand_in: None, tmp_path_factory: pytest.TempPathFactory, target_checkpoint: Path) -> Bundle:
    return tiny.make_bundle(
        tmp_path_factory.mktemp("rtx"), target_checkpoint, backend=TENSORRT_RTX, gpus=("sm89",), nodes=9
    )


def test_each_width_runs_once_is_captured_once_and_then_is_a_graph(rtx_bundle: Bundle) -> None:
    """The first call of a context cannot be captured, and a captured one queues nothing itself."""
    runner = Runner(rtx_bundle)
    stand_in_tensorrt.calls.clear()
    prompt = runner.encode("ab ab ab ab ab ab ab ab ab ab ab ab ab")
    request = Request(prompt, max_tokens=40, sampling=Sampling(seed=1))
    for k in (1, 4, 9):
        runner.generate(dataclasses.replace(request, proposer="ngram", k=k))
    runner.generate(request.plain())
    widths = {width for width, _ in stand_in_tensorrt.calls}
    assert widths <= set(rtx_bundle.manifest.engine_widths)
    assert {2, 5, 10} <= widths
    for width in widths:
        captured = [captured for each, captured in stand_in_tensorrt.calls if each == width]
        assert captured in ([False], [False, True])


def test_a_call_takes_the_next_larger_profile(rtx_bundle: Bundle) -> None:
    session = Runner(rtx_bundle).target
    for tokens, width in ((1, 2), (2, 2), (3, 5), (5, 5), (6, 10), (10, 10), (11, 128)):
        session.truncate(0)
        stand_in_tensorrt.calls.clear()
        assert len(session.grow(range(tokens), range(-1, tokens - 1)).logits) == tokens
        assert [each for each, _ in stand_in_tensorrt.calls] == [width]  # from the third time on a graph is launched
    session.truncate(0)
    with pytest.raises(AssertionError, match="got 129 tokens below 0 nodes, the engine takes 128"):
        session.grow([0] * 129, range(-1, 128))


def test_padding_leaves_no_trace(rtx_bundle: Bundle) -> None:
    """A call's logits depend on its tokens, not on what an earlier one left in the buffers."""
    session = Runner(rtx_bundle).target

    def rows(tokens: list[int]) -> list[np.ndarray]:
        session.truncate(0)
        logits = session.grow(tokens, range(-1, len(tokens) - 1)).logits
        return [logits.row(index).copy() for index in range(len(tokens))]

    first = rows([5, 6, 7])
    rows(list(range(100)))
    for got, wanted in zip(rows([5, 6, 7]), first, strict=True):
        assert np.array_equal(got, wanted)


def test_caches_must_be_updated_in_place(rtx_bundle: Bundle, gpu: Gpu) -> None:
    engine = TensorRtEngine(TENSORRT_RTX, rtx_bundle.engine("target"), "1.0", gpu)
    shape = (1, TOKENS)
    inputs = {"past_key_values.0.key": Tensor(1024, shape, "float16")}
    with pytest.raises(AssertionError, match=r"present.0.key must lie where past_key_values.0.key does"):
        engine.bind(inputs, {present(0, "key"): Tensor(2048, shape, "float16")})


def test_an_engine_of_another_version_is_refused(stand_in: None, tmp_path: Path) -> None:
    file = tmp_path / "model.engine"
    file.write_bytes(b"ftrt" + bytes(5000))
    with pytest.raises(
        TensorRtError, match=r"refuses .*model.engine, built with 0.9: the engine plan file is not comp"
    ):
        load_engine(TENSORRT_RTX, file, "0.9")


@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 2], [1, 3, 4], [4], [0, 1, 5, 6, 9]])
def test_rows_of_an_accepted_path_are_moved_as_on_the_cpu(path: list[int], gpu: Gpu) -> None:
    rng = np.random.default_rng(3)
    device = DeviceKVCache(gpu, SIGNATURE, "float16", capacity=30, rows=40, slots=3)
    host = KVCache(SIGNATURE, "float16", capacity=40)
    rows = {
        (layer, part): rng.standard_normal((3, 40, 4)).astype(np.float16) for layer, part in SIGNATURE.cache_parts()
    }
    for layer, part, buffer in host.buffers(SIGNATURE):
        buffer.numpy()[0] = rows[layer, part]
    for slot in range(3):
        device.write(slot, rows, 40)
    host.gather(7, path)
    device.gather(1, 7, path)
    for layer, part, buffer in host.buffers(SIGNATURE):
        count = 7 + len(path)
        assert np.array_equal(device.read(1, count)[layer, part], buffer.numpy()[0, :, :count])
        for slot in (0, 2):
            assert np.array_equal(device.read(slot, 40)[layer, part], rows[layer, part]), "another slot's rows"


def test_rows_are_copied_into_a_slot_and_out(gpu: Gpu) -> None:
    cache = DeviceKVCache(gpu, SIGNATURE, "float16", capacity=30, rows=40, slots=2)
    rng = np.random.default_rng(5)
    rows = {key: rng.standard_normal((3, 9, 4)).astype(np.float16) for key in SIGNATURE.cache_parts()}
    cache.write(1, rows, 6)
    assert cache.written == [0, 6]
    for key, got in cache.read(1, 8).items():
        assert np.array_equal(got[:, :6], rows[key][:, :6])
        assert not got[:, 6:].any()
    assert not any(got.any() for got in cache.read(0, 40).values())


def test_a_new_cache_is_zero(gpu: Gpu) -> None:
    """What no token wrote is multiplied by zero, which must not give NaN."""
    cache = DeviceKVCache(gpu, SIGNATURE, "float16", capacity=30, rows=40)
    driver = Driver(gpu.device, gpu.stream, gpu.kernels, None)
    for buffer in cache._buffers.values():
        assert not driver.download(buffer, (480,), np.float16).any()


def test_quantized_bundles_decode_at_one_width(
    stand_in: None, tmp_path: Path, target_checkpoint: Path, draft_checkpoint: Path
) -> None:
    """So that plain and speculative decoding round alike."""
    bundle = tiny.make_bundle(
        tmp_path,
        target_checkpoint,
        draft_checkpoint,
        backend=TENSORRT_RTX,
        precision="int8",
        gpus=("sm89",),
        nodes=9,
        accept_quality_loss=True,
    )
    assert bundle.manifest.engine_widths == (10, 128)
    assert bundle.manifest.quality is not None
    runner = Runner(bundle)
    stand_in_tensorrt.calls.clear()
    for sampling in (Sampling(seed=1), Sampling(1.0, seed=2)):
        request = Request(runner.encode("the sun the sun"), max_tokens=30, sampling=sampling)
        plain = runner.generate(request.plain()).ids
        for proposer in ("ngram", "draft_model", "ngram+draft_model"):
            assert runner.generate(dataclasses.replace(request, proposer=proposer)).ids == plain
    assert {width for width, _ in stand_in_tensorrt.calls} <= {10, 128}
