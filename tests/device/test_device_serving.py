"""Several requests share the calls of engines on the device, and write what plain decoding on the CPU writes."""

import dataclasses
import queue
from functools import partial
from pathlib import Path

import pytest

from specrun.engines.backend import ORT_CUDA, TENSORRT_RTX
from specrun.engines.errors import UnfitError
from specrun.engines.manifest import Bundle
from specrun.runner.runner import Completion, Event, Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.serving.service import Service
from specrun.runner.serving.slots import Slots
from tests.device import stand_in_tensorrt
from tests.device.conftest import make

SLOTS = 3
WORDS = ("the sun rose over the sea and the sun", "and the tide came in, the tide", "a sea of")


@pytest.fixture(
    scope="module", params=[(TENSORRT_RTX, "fp16"), (ORT_CUDA, "fp32"), (TENSORRT_RTX, "int8")], ids="-".join
)
def bundle(
    request: pytest.FixtureRequest,
    stand_in: None,
    tmp_path_factory: pytest.TempPathFactory,
    deep_checkpoint: Path,
    draft_checkpoint: Path,
) -> Bundle:
    backend, precision = request.param
    return make(
        tmp_path_factory.mktemp(backend),
        deep_checkpoint,
        draft_checkpoint,
        backend=backend,
        precision=precision,
        gpus=("sm89",),
        slots=SLOTS,
        accept_quality_loss=True,
    )


@pytest.fixture(scope="module")
def solo(bundle: Bundle) -> Runner:
    return Runner(bundle)


@pytest.fixture(scope="module")
def slots(bundle: Bundle) -> Slots:
    return Slots(bundle, SLOTS)


def requests_of(solo: Runner, proposer: str, sampling: Sampling) -> list[Request]:
    return [
        Request(
            solo.encode(words),
            max_tokens=20 + 6 * index,
            sampling=dataclasses.replace(sampling, seed=index),
            proposer=proposer,
            k=3,
        )
        for index, words in enumerate(WORDS)
    ]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "proposer",
    ["none", "ngram", "draft_model_tree", "eagle3", "medusa", "early_exit"],
)
def test_requests_side_by_side(proposer: str, sampling: Sampling, solo: Runner, slots: Slots) -> None:
    if solo.bundle.manifest.quantized and proposer.endswith("_tree"):
        pytest.skip("quantized targets get no trees")
    requests = requests_of(solo, proposer, sampling)
    loaders = [slots.loader(index) for index in range(SLOTS)]
    done: dict[int, Completion] = {}

    def generate(index: int) -> None:
        done[index] = solo.beside(loaders[index]).generate(requests[index])

    stand_in_tensorrt.batches.clear()
    for index in range(SLOTS):
        slots.scheduler.spawn(partial(generate, index))
    steps = 0
    while not slots.scheduler.idle:
        slots.scheduler.step()
        steps += 1
    for index, request in enumerate(requests):
        assert done[index].ids == solo.generate(request.plain()).ids, index
    for loader in loaders:
        loader.release()
    rounds = sum(completion.statistics.rounds for completion in done.values())
    assert proposer not in ("none", "ngram") or steps < rounds + 2 * SLOTS, "they did not share calls"


def test_calls_serve_all_slots(bundle: Bundle, solo: Runner) -> None:
    """Once captured, calls are graphs, which the stand-in does not see; so with slots of its own."""
    if bundle.manifest.backend != TENSORRT_RTX:
        pytest.skip("the stand-in for ONNX Runtime's provider is ONNX Runtime")
    slots = Slots(bundle, SLOTS)
    stand_in_tensorrt.batches.clear()
    stand_in_tensorrt.calls.clear()
    for index, request in enumerate(requests_of(solo, "none", Sampling())):
        slots.scheduler.spawn(partial(solo.beside(slots.loader(index)).generate, request))
    while not slots.scheduler.idle:
        slots.scheduler.step()
    assert set(stand_in_tensorrt.batches) == ({1, SLOTS})
    if bundle.manifest.quantized:
        decoding = {
            batch
            for batch, (width, _) in zip(stand_in_tensorrt.batches, stand_in_tensorrt.calls, strict=True)
            if width != bundle.manifest.engine_widths[-1]
        }
        assert decoding == {SLOTS}, "calls of two shapes may round differently"


def _tokens(events: "queue.SimpleQueue[Event | BaseException]") -> list[int]:
    ids: list[int] = []
    while True:
        event = events.get(timeout=120)
        assert isinstance(event, Event), event
        ids.append(event.token.id)
        if event.finish_reason is not None:
            return ids


def test_a_server_decides_and_reuses_prefixes(bundle: Bundle, solo: Runner) -> None:
    """The next turn of each of three chats, twice."""
    service = Service(bundle, SLOTS, queue_size=8)
    service.start()
    try:
        prompts = [list(solo.encode(f"{words}, said the old man by the sea, " * 2)) for words in WORDS]
        for turn in range(3):
            waiting = []
            for index, prompt in enumerate(prompts):
                events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
                request = Request(tuple(prompt), max_tokens=10, sampling=Sampling(1.0, seed=index))
                waiting.append((request, events, service.submit(request, events.put, 120)))
            written = [_tokens(events) for _, events, _ in waiting]
            while service.load.running:  # the stand-in driver is for one thread at a time
                pass
            for (request, _, generation), ids, prompt in zip(waiting, written, prompts, strict=True):
                assert tuple(ids) == solo.generate(request.plain()).ids
                assert not turn or generation.statistics.reused_tokens > 0
                prompt += ids + list(solo.encode(" and"))
        assert service.pace.costs.predict("target", 1) is not None
    finally:
        service.stop(10)


def test_more_slots_than_the_engines_have_are_refused(bundle: Bundle) -> None:
    with pytest.raises(UnfitError, match=rf"got {SLOTS + 1} slots, .* serve {SLOTS} .* --slots {SLOTS + 1}"):
        Service(bundle, SLOTS + 1, queue_size=1)
