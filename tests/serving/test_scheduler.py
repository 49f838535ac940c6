"""Sequences that share engine calls write what each writes alone, in quantized bundles, too."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest

from specrun.engines.manifest import Bundle
from specrun.runner.runner import Completion, Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.serving.slots import Slots
from tests import tiny

SLOTS = 5


@pytest.fixture(scope="module", params=["fp32", "int8"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, deep_checkpoint: Path) -> Bundle:
    draft = tiny.make_model(tiny.llama(num_hidden_layers=1), seed=1, sharpness=12.0)
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny.save_checkpoint(directory / "draft", draft)
    return tiny.make_bundle(directory, deep_checkpoint, checkpoint, precision=request.param, accept_quality_loss=True)


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model", "ngram+draft_model"])
def test_sequences_side_by_side(proposer: str, sampling: Sampling, pair: Bundle) -> None:
    """Ragged prompts and lengths; with one token each, a quantized target must round as for one sequence."""
    solo = Runner(pair)
    slots = Slots(pair, SLOTS)
    requests = [
        Request(
            solo.encode("the sun rose over the sea " * (1 + index)),
            max_tokens=60 + 8 * index,
            sampling=dataclasses.replace(sampling, seed=index),
            proposer=proposer,
            k=4,
        )
        for index in range(SLOTS)
    ]
    done: dict[int, Completion] = {}

    def generate(index: int) -> None:
        done[index] = solo.beside(slots.loader(index)).generate(requests[index])

    for index in range(SLOTS):
        slots.scheduler.spawn(partial(generate, index))
    calls = 0
    while not slots.scheduler.idle:
        slots.scheduler.step()
        calls += 1
    for index, request in enumerate(requests):
        assert done[index].ids == solo.generate(request.plain()).ids, index
    rounds = sum(completion.statistics.rounds for completion in done.values())
    assert proposer != "none" or calls < rounds  # they did share calls
