"""Sequences that share engine calls write what each writes alone, in quantized bundles, too."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from specrun.engines.manifest import TARGET, Bundle
from specrun.runner.call_costs import CallCosts
from specrun.runner.runner import Completion, Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.serving.batch import BatchCache, BatchEngine
from specrun.runner.serving.slots import Slots
from specrun.runner.slot_session import SlotCall, SlotSession, at_once

SLOTS = 5


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model", "ngram+draft_model"])
def test_sequences_side_by_side(
    proposer: str, sampling: Sampling, pair: Bundle, alone: Callable[[Request], tuple[int, ...]]
) -> None:
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
        assert done[index].ids == alone(request), index
    rounds = sum(completion.statistics.rounds for completion in done.values())
    assert proposer != "none" or calls < rounds  # they did share calls


def test_buffers_that_were_outgrown_are_freed(served_bundle: Bundle, solo: Runner) -> None:
    """Whatever slots were bound to them."""
    slots = Slots(served_bundle, SLOTS)
    runners = [solo.beside(slots.loader(index)) for index in range(SLOTS)]

    def run(*jobs: tuple[int, int]) -> None:
        for slot, tokens in jobs:
            prompt = (solo.encode("the sun rose over the sea ") * 30)[:tokens]
            request = Request(prompt, max_tokens=4, sampling=Sampling(seed=1), proposer="none")
            slots.scheduler.spawn(partial(runners[slot].generate, request))
        while not slots.scheduler.idle:
            slots.scheduler.step()

    for first in range(SLOTS):
        run(*((slot, 20) for slot in range(first, SLOTS)))
    cache = slots.once("target", lambda: None)
    small = [weakref.ref(array) for array in cache._arrays.values()]
    run((0, 300))
    assert cache.rows > 300
    gc.collect()
    assert not any(reference() is not None for reference in small)


def batch_engine(bundle: Bundle, slots: int, costs: CallCosts) -> tuple[BatchEngine, BatchCache]:
    target = bundle.manifest.target
    cache = BatchCache(target.signature, target.cache_dtype, 64, slots, 8)
    shape = target.signature, cache, target.cache_dtype, target.vocabulary_size
    return BatchEngine(bundle.engine(TARGET), *shape, None, costs, TARGET), cache


def test_empty_slots_between_others_are_part_of_what_a_batch_costs(pair: Bundle) -> None:
    """Whoever asks what a call will cost knows how many requests there are, not where they sit."""
    sizes: list[tuple[int, int]] = []

    class Noted(CallCosts):
        def call(self, engine: str, batch: int, width: int, seconds: float) -> None:
            sizes.append((batch, width))

    engine, _ = batch_engine(pair, 8, Noted())
    mask = np.tril(np.ones((3, 3), bool))
    engine.call([SlotCall(slot, [5, 6, 7], np.arange(3), mask, 0, 0, None, 3) for slot in (0, 7)])
    assert sizes == [(2, 3)]


def test_logits_of_the_tokens_that_are_wanted(pair: Bundle) -> None:
    """The last ones of each call. A draft that read others would be wrong, and never noticed in the output."""
    engine, cache = batch_engine(pair, 1, CallCosts())
    session = SlotSession(at_once, engine, cache, 0)
    tokens = [5, 17, 203, 44, 90]
    everything = session.grow(tokens, range(-1, 4)).logits
    rows = [everything.row(index).copy() for index in range(5)]
    for wanted in (3, 1, 0):
        session.truncate(0)
        logits = session.grow(tokens, range(-1, 4), wanted=wanted).logits
        assert len(logits) == wanted
        for index in range(wanted):
            assert (logits.row(index) == rows[5 - wanted + index]).all()
