"""Requests that begin like an earlier one do not read those tokens again, and write what they would have written."""

import dataclasses
import queue
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from specrun.engines.manifest import Bundle
from specrun.runner.runner import Event, Request, Runner
from specrun.runner.sampling import Sampling
from specrun.runner.serving.prefix_cache import FEWEST_TOKENS, PrefixCache
from specrun.runner.serving.service import Service
from specrun.runner.serving.slots import Slots
from specrun.runner.slot_session import Rows
from specrun.runner.statistics import Statistics

TURNS, WRITTEN = 3, 24


class Client:
    """Of a service, without HTTP."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def ask(self, *requests: Request) -> list[tuple[list[int], Statistics]]:
        """All at once: ids written, and statistics."""
        waiting = []
        for request in requests:
            events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()
            waiting.append((events, self._service.submit(request, events.put, timeout=120)))
        done = []
        for events, generation in waiting:
            ids: list[int] = []
            finished = False
            while not finished:
                event = events.get(timeout=120)
                assert isinstance(event, Event), event
                ids.append(event.token.id)
                finished = event.finish_reason is not None
            done.append((ids, generation.statistics))
        while self._service.load.running:  # rows are kept after the last event
            pass
        return done


@pytest.fixture(scope="module")
def client(served_bundle: Bundle) -> Iterator[Client]:
    service = Service.open(served_bundle.path, slots=4, queue_size=16)
    yield Client(service)
    service.stop(10)


def conversation(runner: Runner, topic: str) -> tuple[list[int], list[list[int]]]:
    """What it begins with, and what is said in each turn after the first."""
    start = list(runner.encode(f"{topic} rose over the sea and the sun was red, so the old man began to"))
    return start, [list(runner.encode(f" said the {topic} number {turn}")) for turn in range(1, TURNS)]


@pytest.mark.parametrize("sampling", [Sampling(seed=3), Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("proposer", ["none", "draft_model", "eagle3_tree", "early_exit", None])
def test_turns_of_a_chat(proposer: str | None, sampling: Sampling, client: Client, solo: Runner) -> None:
    prompt, said = conversation(solo, f"{sampling.temperature} {proposer}: the moon")
    before = 0
    for turn in range(TURNS):
        request = Request(
            tuple(prompt),
            max_tokens=WRITTEN,
            sampling=sampling,
            proposer=proposer,
            k=None if proposer is None else 3,
        )
        ((ids, statistics),) = client.ask(request)
        assert tuple(ids) == solo.generate(request.plain()).ids, turn
        # What the last round accepted was not committed.
        assert max(0, before - 20) <= statistics.reused_tokens <= max(0, before - 2)
        before = len(prompt) + len(ids)
        prompt += ids + (said[turn] if turn < len(said) else [])


def test_drafts_go_on_after_turns_they_took_no_part_in(client: Client, solo: Runner) -> None:
    """Plain turns leave an EAGLE head behind a gap, and a draft model behind."""
    for proposer in ("eagle3", "eagle3_tree", "draft_model", "medusa", "early_exit"):
        prompt, said = conversation(solo, f"{proposer} river")
        for turn, who in enumerate(("none", proposer, proposer)):
            request = Request(tuple(prompt), max_tokens=WRITTEN, sampling=Sampling(seed=1), proposer=who)
            ((ids, statistics),) = client.ask(request)
            assert tuple(ids) == solo.generate(request.plain()).ids, (proposer, turn)
            if who != "none":
                assert statistics.reused_tokens > 0
                assert statistics.proposed > 0
            prompt += ids + (said[turn] if turn < len(said) else [])


def test_requests_side_by_side_that_begin_alike_do_not_see_each_other(client: Client, solo: Runner) -> None:
    """The same beginning, then other words; again with all of their rows held."""
    start = list(solo.encode("a common prompt of the system, long enough to be worth it: the sun rose over the sea "))
    client.ask(Request(tuple(start), max_tokens=4, sampling=Sampling(seed=0)))
    requests = [
        Request(
            tuple(start + list(solo.encode(f"and {word} said " * 3))),
            max_tokens=WRITTEN,
            sampling=Sampling(1.0, seed=index),
        )
        for index, word in enumerate(("one", "two", "red", "sun"))
    ]
    for proposer in ("ngram+eagle3_tree", "none", "draft_model"):
        asked = [dataclasses.replace(request, proposer=proposer) for request in requests]
        for (ids, statistics), request in zip(client.ask(*asked), asked, strict=True):
            assert tuple(ids) == solo.generate(request.plain()).ids
            assert statistics.reused_tokens >= len(start) - 2


def test_rows_that_were_decoded_equal_those_of_a_prompt(
    pair: Bundle, alone: Callable[[Request], tuple[int, ...]]
) -> None:
    """Of a quantized target in every bit, or an activation would fall on the next level."""
    solo = Runner(pair)
    service = Service.open(pair.path, slots=3, queue_size=16)
    try:
        client = Client(service)
        prompts = [conversation(solo, topic) for topic in ("moon", "star", "cloud")]
        for turn in range(TURNS):
            requests = [
                Request(tuple(prompt), max_tokens=60, sampling=Sampling(1.0, seed=index))
                for index, (prompt, _) in enumerate(prompts)
            ]
            for (ids, statistics), request, (prompt, said) in zip(
                client.ask(*requests), requests, prompts, strict=True
            ):
                assert tuple(ids) == alone(request)
                assert not turn or statistics.reused_tokens > 0
                prompt += ids + (said[turn] if turn < len(said) else [])
    finally:
        service.stop(10)


def test_without_a_prefix_cache_nothing_is_reused(served_bundle: Bundle, solo: Runner) -> None:
    service = Service.open(served_bundle.path, slots=1, queue_size=4, prefix_bytes=0)
    try:
        client, request = Client(service), Request(solo.encode("the sun rose over the sea " * 4), max_tokens=8)
        for _ in range(2):
            ((_, statistics),) = client.ask(request)
            assert statistics.reused_tokens == 0
        assert service.prefixes.size == 0
    finally:
        service.stop(10)


def rows(tokens: Sequence[int]) -> dict[str, Rows]:
    return {"target": {(0, "key"): np.zeros((1, len(tokens), 8), np.float32)}}


def test_the_most_alike_sequence_is_found_and_never_too_many_rows() -> None:
    cache = PrefixCache(1 << 20)
    first, second = list(range(100)), [*range(60), *range(200, 240)]
    cache.put(first, rows(first), {})
    cache.put(second, rows(second), {})
    for prompt, count in (
        ([*range(60), 200, 201, 7], 61),
        ([*range(90), 7, 7], 89),
        (first, 99),
        (first[:50], 49),
        ([7, *first], None),
        (first[:FEWEST_TOKENS], None),
    ):
        found = cache.find(prompt)
        assert (None if found is None else found[1]) == count


def test_what_was_not_used_for_longest_gives_way() -> None:
    sequences = [[start, *range(100)] for start in range(3)]
    cache = PrefixCache(2 * (101 * 8 + rows(sequences[0])["target"][0, "key"].nbytes))
    for sequence in sequences[:2]:
        cache.put(sequence, rows(sequence), {})
    assert cache.find(sequences[0]) is not None
    cache.put(sequences[2], rows(sequences[2]), {})
    assert len(cache) == 2
    assert cache.find(sequences[1]) is None
    assert cache.find(sequences[0]) is not None
    assert cache.size <= 2 * (101 * 8 + 101 * 8 * 4)
    big = list(range(1000, 2000))
    cache.put(big, rows(big), {})
    assert cache.find(big) is None, "larger than all that may be held"


def test_a_sequence_replaces_what_it_continues() -> None:
    cache, turn = PrefixCache(1 << 20), list(range(50))
    cache.put(turn, rows(turn), {})
    cache.put(turn + [7] * 50, rows(turn + [7] * 50), {})
    assert len(cache) == 1
    cache.put(turn, rows(turn), {})
    assert len(cache) == 1
    assert cache.find([*turn, 9]) is not None


def test_a_head_behind_a_gap_gives_no_row_of_a_token_that_is_not_shared(served_bundle: Bundle, solo: Runner) -> None:
    """Its rows are of later tokens than the target's rows of the same number."""
    slots, kept = Slots(served_bundle, 2), PrefixCache(1 << 28)
    loaders = [slots.loader(slot) for slot in range(2)]
    runners = [solo.beside(loader) for loader in loaders]
    prompt = list(solo.encode("the sun rose over the sea " * 3))

    def turn(slot: int, proposer: str) -> int:
        done: list[int] = []
        reused: list[int] = []

        def generate() -> None:
            reused.append(loaders[slot].recall(prompt, kept))
            request = Request(tuple(prompt), max_tokens=20, sampling=Sampling(seed=1), proposer=proposer, k=3)
            done.extend(event.token.id for event in runners[slot].stream(request, reused=reused[0]))
            loaders[slot].remember(prompt + done, kept)

        slots.scheduler.spawn(generate)
        while not slots.scheduler.idle:
            slots.scheduler.step()
        loaders[slot].release()
        prompt.extend(done)
        return reused[0]

    turn(0, "eagle3")
    turn(0, "none")  # the head reads nothing of this turn
    gap = len(prompt)
    assert turn(0, "eagle3") > 0
    turn(1, "eagle3")
    shared = prompt[: gap + 4]  # ends soon behind the gap
    count = loaders[1].recall([*shared, 1, 2, 3], kept)
    assert count >= gap
    ended, _ = kept.find([*shared, 1, 2, 3]) or pytest.fail("it is held")
    lag, held = ended.lags["eagle3"], ended.rows["eagle3"][0, "key"].shape[1]
    assert held > count - lag, "so there are rows that must not be given"
    assert loaders[1]._sessions["eagle3"].length == max(0, count - lag)
