"""The CUDA accept step against the NumPy reference, bit for bit: on a stand-in driver, and on a GPU if there is one."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from specrun.runner import noise
from specrun.runner.acceptor import accept
from specrun.runner.cuda.acceptor import CudaAcceptor
from specrun.runner.cuda.row_sampler import Part, RowSampler, Shape
from specrun.runner.filters import LogitsError, summarize
from specrun.runner.sampling import NO_GUESSES, Chooser, Sampling
from specrun.runner.types import EMPTY, Proposal, Verdict
from tests.kernels.cases import Case, as_stored, make_case, make_draft_case, make_rejection_case
from tests.kernels.driver import Driver
from tests.runner.test_sampling import chi_square, target_probs

Array = np.ndarray[Any, Any]
CASES = 300
LAUNCHES = [{"threads": 32, "chunks": 1}, {"threads": 128, "chunks": 3}, {"threads": 256, "chunks": 5}]
BATCH = 10  # cases per test


@pytest.fixture(scope="module", params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver.of_gpu() if request.param == "gpu" else Driver.of_stand_in()


def sampler_of(
    driver: Driver, case: Case, launch: dict[str, int], ids: Array | None = None, **changes: Any
) -> RowSampler:
    requests, rows, stride = case.logits.shape
    shape = {
        "requests": requests,
        "rows": rows,
        "columns": case.columns,
        "stride": stride,
        "dtype": case.dtype,
        "vocabulary_size": case.columns,
    }
    return RowSampler(driver.kernels, driver.device, driver.stream, Shape(**{**shape, **launch, **changes}), ids)


def parts_of(case: Case) -> list[Part]:
    return [Part(*part) for part in zip(case.choosers, case.positions, case.proposals, strict=True)]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_every_choice_and_verdict_equals_the_reference(first: int, launch: dict[str, int], driver: Driver) -> None:
    for index in range(first, first + BATCH):
        case = make_case(index)
        driver.shuffle(index + 1)
        sampler = sampler_of(driver, case, launch)
        acceptor = CudaAcceptor(sampler, driver.device, driver.stream)
        logits = driver.upload(as_stored(case.logits, case.dtype))
        sampler.write(parts_of(case))
        acceptor.launch(int(logits.handle))
        check_verdicts(acceptor, case, index)
        sampler.best_tokens.download(driver.stream)
        sampler.summaries.download(driver.stream)
        driver.stream.sync()
        for request, proposal in enumerate(case.proposals):
            for row in range(1 + len(proposal.tokens)):
                assert sampler.best_tokens.array[request, row, 0] == case.choice(request, row), (index, request, row)
            check_summary(case, request, sampler)


def numbers_of(verdict: Verdict) -> list[int]:
    return [len(verdict.path), verdict.next_token, *(node + 1 for node in verdict.path)]


def expected_numbers(case: Case, request: int) -> list[int]:
    rows = case.logits[request, :, : case.columns]
    try:
        return numbers_of(accept(case.proposals[request], rows, case.choosers[request], case.positions[request]))
    except LogitsError:
        return [-1, -1]


def check_summary(case: Case, request: int, sampler: RowSampler) -> None:
    chooser = case.choosers[request]
    got = sampler.summaries.array[request, 0]
    row = case.row(request, 0)
    if chooser.processor is not None:
        row = chooser.processor.process(row, [])
    try:
        wanted = summarize(row, chooser.policy, "row")
    except LogitsError:
        assert not got["valid"]
        return
    assert (got["best"], got["top"], got["threshold"]) == (wanted.best, wanted.top, wanted.threshold)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_a_drafts_guesses_equal_the_reference(first: int, launch: dict[str, int], driver: Driver) -> None:
    """Tokens, shares and, for the rejection rule, distributions; with reduced vocabularies."""
    for index in range(first, first + BATCH):
        case, ids, vocabulary_size = make_draft_case(index)
        rejecting = index % 3 == 0
        if rejecting:
            for at, chooser in enumerate(case.choosers):
                sampling = dataclasses.replace(chooser.sampling, accept="rejection")
                case.choosers[at] = Chooser(sampling, chooser.processor)
        count = 1 if rejecting else min(4, case.columns)
        driver.shuffle(index + 1)
        sampler = sampler_of(driver, case, launch, ids, vocabulary_size=vocabulary_size, guesses=count)
        logits = driver.upload(as_stored(case.logits, case.dtype))
        probs = driver.upload(np.zeros((len(case.choosers), 1, vocabulary_size), np.float32)) if rejecting else None
        sampler.write(parts_of(case))
        sampler.launch_choices(int(logits.handle), drafting=True, probs=int(probs.handle) if probs else 0)
        for request, got in enumerate(sampler.guesses()):
            try:
                row, position = case.row(request, 0), case.positions[request]
                wanted = case.choosers[request].best(row, position, count, ids)
            except LogitsError:
                wanted = NO_GUESSES
            assert got.tokens.tolist() == wanted.tokens.tolist(), (index, request)
            assert got.shares.tolist() == wanted.shares.tolist(), (index, request)
            if probs is not None and wanted.probs is not None:
                drawn_from = driver.download(probs, (len(case.choosers), vocabulary_size), np.float32)[request]
                assert np.array_equal(drawn_from[: len(wanted.probs)], wanted.probs)
                assert not drawn_from[len(wanted.probs) :].any()


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_the_rejection_rule_equals_the_reference(first: int, launch: dict[str, int], driver: Driver) -> None:
    for index in range(first, first + BATCH):
        case, drafts = make_rejection_case(index)
        requests, nodes, columns = np.shape(drafts)
        draft_probs = np.full((requests, nodes, columns), np.nan, np.float32)
        for request, proposal in enumerate(case.proposals):
            for node, probs in enumerate(proposal.draft_probs or ()):
                draft_probs[request, node] = probs
        driver.shuffle(index + 1)
        sampler = sampler_of(driver, case, launch)
        acceptor = CudaAcceptor(sampler, driver.device, driver.stream, rejection=True)
        logits, uploaded = driver.upload(case.logits), driver.upload(draft_probs)
        sampler.write(parts_of(case))
        acceptor.launch(int(logits.handle), int(uploaded.handle))
        check_verdicts(acceptor, case, index)


def test_both_rules_in_one_call(driver: Driver) -> None:
    case, drafts = make_rejection_case(0)
    coupled = [Chooser(dataclasses.replace(case.choosers[0].sampling, accept="coupled"))] * len(case.choosers)
    mixed = dataclasses.replace(case, choosers=[coupled[0], *case.choosers[1:]])
    assert len({chooser.sampling.accept for chooser in mixed.choosers}) == 2
    sampler = sampler_of(driver, mixed, LAUNCHES[1])
    acceptor = CudaAcceptor(sampler, driver.device, driver.stream, rejection=True)
    logits = driver.upload(mixed.logits)
    probs = np.zeros(np.shape(drafts), np.float32)
    for request, proposal in enumerate(case.proposals):
        for node, drawn_from in enumerate(proposal.draft_probs or ()):
            probs[request, node] = drawn_from
    uploaded = driver.upload(probs)
    sampler.write(parts_of(mixed))
    acceptor.launch(int(logits.handle), int(uploaded.handle))
    check_verdicts(acceptor, mixed, 0)


@pytest.mark.parametrize(("columns", "threads"), [(49_152, 1024), (262_144, 1024), (151_936, 512)])
def test_large_vocabularies(columns: int, threads: int, driver: Driver) -> None:
    rng = np.random.default_rng(columns)
    logits = (rng.standard_normal((2, 3, columns)) * 3).astype(np.float32)
    choosers = [Chooser(Sampling(1.0, top_k=50, top_p=0.95, seed=1)), Chooser(Sampling(1.0, seed=2))]
    case = Case(logits, "float32", columns, choosers, [7, 9], [EMPTY, EMPTY])
    for request in range(2):
        case.proposals[request] = Proposal.chain([case.choice(request, 0), 5])
    sampler = sampler_of(driver, case, {"threads": threads, "chunks": 7})
    acceptor = CudaAcceptor(sampler, driver.device, driver.stream)
    uploaded = driver.upload(logits)
    sampler.write(parts_of(case))
    acceptor.launch(int(uploaded.handle))
    check_verdicts(acceptor, case, columns)


ORACLE_SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("settings", ORACLE_SETTINGS, ids=str)
def test_choices_equal_a_double_precision_oracle(settings: dict[str, float], driver: Driver) -> None:
    """Sorting instead of thresholds, library logarithms instead of polynomials. Rows in which two tokens are closer
    together than single precision tells, or that a filter cuts where it cannot, are left out; they are few."""
    rows, columns = 400, 1000
    logits = (np.random.default_rng(3).standard_normal((rows, 1, columns)) * 2).astype(np.float32)
    choosers = [Chooser(Sampling(**settings, seed=seed)) for seed in range(rows)]  # type: ignore[arg-type]
    case = Case(logits, "float32", columns, choosers, list(range(rows)), [EMPTY] * rows)
    sampler = sampler_of(driver, case, LAUNCHES[1])
    uploaded = driver.upload(logits)
    sampler.write(parts_of(case))
    sampler.launch_choices(int(uploaded.handle))
    sampler.best_tokens.download(driver.stream)
    driver.stream.sync()
    judged = 0
    for row in range(rows):
        words = noise.words(row, row, columns).astype(np.float64)
        scores = logits[row, 0].astype(np.float64) / settings["temperature"]
        noisy = scores - np.log(-np.log((words + 0.5) / 2**32))
        probs = target_probs(logits[row, 0], **settings)  # type: ignore[arg-type]
        nearly = {**settings, **({"top_p": settings["top_p"] * (1 - 1e-5)} if "top_p" in settings else {})}
        if not np.array_equal(probs > 0, target_probs(logits[row, 0], **nearly) > 0):  # type: ignore[arg-type]
            continue
        noisy[probs == 0] = -np.inf
        second, first = np.partition(noisy, -2)[-2:]
        if first - second < 1e-5:
            continue
        judged += 1
        assert sampler.best_tokens.array[row, 0, 0] == noisy.argmax(), row
    assert judged > 0.97 * rows


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.8}], ids=str)
def test_choices_over_seeds_follow_the_target(settings: dict[str, float], driver: Driver) -> None:
    settings = {"temperature": 1.0, **settings}
    rows = 20_000
    logits = np.random.default_rng(1).normal(0, 1.5, 8).astype(np.float32)
    choosers = [Chooser(Sampling(**settings, seed=seed)) for seed in range(rows)]  # type: ignore[arg-type]
    case = Case(np.tile(logits, (rows, 1, 1)), "float32", 8, choosers, [3] * rows, [EMPTY] * rows)
    sampler = sampler_of(driver, case, {"threads": 32, "chunks": 1})
    uploaded = driver.upload(case.logits)
    sampler.write(parts_of(case))
    sampler.launch_choices(int(uploaded.handle))
    sampler.best_tokens.download(driver.stream)
    driver.stream.sync()
    counts = np.bincount(sampler.best_tokens.array[:, 0, 0], minlength=8)
    assert chi_square(counts, target_probs(logits, **settings)) > 1e-4  # type: ignore[arg-type]
    wrong = {**settings, "temperature": settings["temperature"] * 1.3}
    assert chi_square(counts, target_probs(logits, **wrong)) < 1e-4  # type: ignore[arg-type]


def test_more_than_the_shape_has_room_for_is_refused(driver: Driver) -> None:
    case = make_case(0)
    sampler = sampler_of(driver, case, LAUNCHES[0])
    with pytest.raises(AssertionError, match="requests"):
        sampler.write(parts_of(case) * 2)
    wide = Proposal.chain([0] * case.logits.shape[1])
    with pytest.raises(AssertionError, match="proposed nodes"):
        sampler.write([Part(case.choosers[0], 0, wide)])


def check_verdicts(acceptor: CudaAcceptor, case: Case, index: int) -> None:
    got = acceptor.read()
    for request in range(len(case.proposals)):
        wanted = expected_numbers(case, request)
        if wanted[1] < 0:
            assert got[request, 1] == -1, (index, request)
        else:
            assert got[request, : len(wanted)].tolist() == wanted, (index, request)


def test_a_captured_graph_serves_other_requests(driver: Driver) -> None:
    """Launches alone are captured; what changes from round to round lies in device memory."""
    rng = np.random.default_rng(4)
    first, second = (
        Case(
            (rng.standard_normal((2, 4, 500)) * 3).astype(np.float32),
            "float32",
            500,
            [Chooser(Sampling(1.0, top_p=0.9, seed=seed)), Chooser(Sampling(seed=seed))],
            [seed, 10 * seed],
            [EMPTY, EMPTY],
        )
        for seed in (1, 2)
    )
    for case in (first, second):
        for request in range(2):
            case.proposals[request] = Proposal.chain([case.choice(request, 0), 7])
    sampler = sampler_of(driver, first, LAUNCHES[1])
    acceptor = CudaAcceptor(sampler, driver.device, driver.stream)
    logits = driver.upload(first.logits)
    sampler.write(parts_of(first))
    acceptor.launch(int(logits.handle))  # loads the kernels
    builder = driver.stream.create_graph_builder().begin_building()
    acceptor.launch(int(logits.handle))
    graph = builder.end_building().complete()
    for case in (second, first):
        logits.copy_from(driver.upload(case.logits), stream=driver.stream)
        sampler.write(parts_of(case))
        graph.launch(driver.stream)
        check_verdicts(acceptor, case, 0)
    assert expected_numbers(first, 0) != expected_numbers(second, 0)
