"""Generations on the device equal those on the CPU, token for token, whatever proposes."""

import dataclasses
import json
from typing import Any

import pytest

from specrun.engines.backend import TENSORRT_RTX
from specrun.engines.errors import RequestError, UnfitError
from specrun.engines.manifest import Bundle
from specrun.runner.cuda.gpu import DeviceError
from specrun.runner.grammar import Grammar
from specrun.runner.processors import Processing
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling
from tests.device import stand_in_tensorrt
from tests.device.conftest import CAPACITY
from tests.kernels.driver import load_stand_in

PROMPT = "the sun rose over the sea and the sun"
PROPOSERS = [
    "none",
    "ngram",
    *("draft_model", "draft_model_tree", "medusa", "medusa_tree", "eagle", "eagle_tree", "eagle3", "eagle3_tree"),
    *("early_exit", "early_exit_tree", "ngram+draft_model_tree"),
]
GREEDY, SAMPLED = Sampling(seed=1), Sampling(1.0, top_p=0.9, seed=7)


def request_of(runner: Runner, **settings: Any) -> Request:
    return dataclasses.replace(Request(runner.encode(PROMPT), max_tokens=24), **settings)


def plain_on_the_cpu(request: Request, reference: Runner) -> tuple[int, ...]:
    return reference.generate(request.plain()).ids


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_plain_decoding_on_the_cpu(
    proposer: str, k: int, sampling: Sampling, device_runner: Runner, reference_runner: Runner
) -> None:
    request = request_of(device_runner, sampling=sampling, proposer=proposer, k=k)
    assert device_runner.generate(request).ids == plain_on_the_cpu(request, reference_runner)


@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model_tree", "medusa", "eagle3"])
@pytest.mark.parametrize(
    "processing",
    [
        Processing(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logit_bias={60: 4.0, 61: -3.0}),
        Processing(forbidden_token_ids=frozenset(range(100, 200)), min_tokens=6),
        Processing(grammar=Grammar("regex", "[a-f ]{3,30}")),
    ],
    ids=["penalties", "masks", "grammar"],
)
def test_processors_are_the_same_on_the_device(
    processing: Processing, proposer: str, device_runner: Runner, reference_runner: Runner
) -> None:
    """Drafts apply them along the path that leads to a guess."""
    request = request_of(device_runner, sampling=SAMPLED, processing=processing, proposer=proposer, k=3)
    assert device_runner.generate(request).ids == plain_on_the_cpu(request, reference_runner)


@pytest.mark.parametrize("proposer", ["ngram", "draft_model", "eagle3", "medusa"])
def test_the_rejection_rule_and_its_statistics_are_those_of_the_cpu(
    proposer: str, device_runner: Runner, reference_runner: Runner
) -> None:
    """Other tokens than plain decoding, but a function of the seed: what was drafted and accepted is the same too."""
    sampling = dataclasses.replace(SAMPLED, accept="rejection")
    request = request_of(device_runner, sampling=sampling, proposer=proposer, k=3)
    got, wanted = device_runner.generate(request), reference_runner.generate(request)
    assert got.ids == wanted.ids
    assert got.statistics.rounds == wanted.statistics.rounds


@pytest.mark.parametrize(
    "proposer", ["draft_model_tree", "medusa_tree", "eagle_tree", "eagle3_tree", "early_exit_tree"]
)
def test_drafts_guess_on_the_device_what_they_guess_on_the_cpu(
    proposer: str, device_runner: Runner, reference_runner: Runner
) -> None:
    """Equal output alone would not show it: any guess gives that."""
    request = request_of(device_runner, sampling=SAMPLED, proposer=proposer, k=3)
    got, wanted = device_runner.generate(request).statistics, reference_runner.generate(request).statistics
    assert (got.rounds, got.acceptance_length) == (wanted.rounds, wanted.acceptance_length)


def test_log_probabilities_are_the_same(device_runner: Runner, reference_runner: Runner) -> None:
    """Up to the rounding of half-precision logits, which depends on the width of a call."""
    request = request_of(device_runner, sampling=SAMPLED, proposer="ngram", k=3, logprobs=4)
    got, wanted = device_runner.generate(request).logprobs, reference_runner.generate(request).logprobs
    assert got is not None
    assert wanted is not None
    for one, other in zip(got, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=4e-3)
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=4e-3)


def test_prompts_are_read_in_chunks(device_runner: Runner, reference_runner: Runner) -> None:
    """More than one prefill chunk, and more than the draft's context of 96 tokens."""
    prompt = (device_runner.encode(PROMPT) * 20)[:141]
    for proposer in ("none", "ngram", "draft_model", "eagle3_tree"):
        request = request_of(device_runner, prompt_ids=prompt, max_tokens=12, proposer=proposer, k=3)
        assert device_runner.generate(request).ids == plain_on_the_cpu(request, reference_runner)


@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model_tree", "eagle3_tree", "early_exit"])
def test_requests_end_at_the_capacity(proposer: str, device_runner: Runner, reference_runner: Runner) -> None:
    """Calls are padded to a width, and there is less room left than that."""
    tokens = device_runner.encode(PROMPT) * 20
    for length in range(CAPACITY - 4, CAPACITY):
        request = request_of(device_runner, prompt_ids=tokens[:length], max_tokens=50, proposer=proposer, k=3)
        got = device_runner.generate(request)
        assert (len(got.ids), got.finish_reason) == (CAPACITY - length, "length")
        assert got.ids == plain_on_the_cpu(request, reference_runner)


def test_more_than_the_engines_take_at_once_is_refused(device_runner: Runner) -> None:
    with pytest.raises(RequestError, match="got k = 128, the engines of this bundle verify at most 127"):
        device_runner.generate(request_of(device_runner, k=128))
    with pytest.raises(RequestError, match="got nodes = 200"):
        device_runner.generate(request_of(device_runner, proposer="eagle_tree", nodes=200))


def test_a_failing_call_ends_the_request_and_the_next_one_works(
    device_bundle: Bundle, reference_runner: Runner
) -> None:
    """Before, while and after CUDA graphs are captured."""
    if device_bundle.manifest.backend != TENSORRT_RTX:
        pytest.skip("the stand-in for ONNX Runtime's provider is ONNX Runtime, which does not fail")
    runner = Runner(device_bundle)
    request = request_of(runner, proposer="draft_model", k=3)
    wanted = plain_on_the_cpu(request, reference_runner)
    for good_calls in range(6):
        stand_in_tensorrt.failures.append(good_calls)
        with pytest.raises(DeviceError, match="failed on the GPU"):
            runner.generate(request)
        assert not stand_in_tensorrt.failures
        assert runner.generate(dataclasses.replace(request, max_tokens=3)).ids == wanted[:3]
        runner = Runner(device_bundle)
    assert runner.generate(request).ids == wanted


def test_a_failing_kernel_ends_the_request_and_the_next_one_works(
    device_runner: Runner, reference_runner: Runner
) -> None:
    request = request_of(device_runner, proposer="draft_model_tree", k=3, nodes=7, sampling=SAMPLED)
    events = device_runner.stream(request)
    next(events)
    load_stand_in().stand_in_fail()
    with pytest.raises(DeviceError, match="STAND_IN_DRIVER_ERROR"):
        list(events)
    assert device_runner.generate(request).ids == plain_on_the_cpu(request, reference_runner)


def test_a_bundle_for_another_gpu_is_refused(device_bundle: Bundle) -> None:
    manifest = dataclasses.replace(device_bundle.manifest, gpus=("sm86",))
    with pytest.raises(UnfitError, match=r"this GPU is sm89, .* was built for sm86; rebuild it with: .* --gpu sm89"):
        Runner(dataclasses.replace(device_bundle, manifest=manifest))


def test_without_a_gpu_the_runner_says_what_it_needs(device_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.core

    def no_device(number: int) -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    monkeypatch.setattr(cuda.core, "Device", no_device)
    with pytest.raises(UnfitError, match=r"needs an NVIDIA GPU \(sm86, sm89\).*no CUDA-capable device"):
        Runner(device_bundle)


def test_json_output_ends_where_its_grammar_does(device_runner: Runner, reference_runner: Runner) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    processing = Processing(grammar=Grammar("json_schema", schema))
    request = request_of(device_runner, max_tokens=60, processing=processing, proposer="ngram+draft_model", k=8)
    got = device_runner.generate(request)
    assert got.ids == plain_on_the_cpu(request, reference_runner)
    if got.finish_reason == "stop":
        assert json.loads(got.text)["a"] in (1, 2)
