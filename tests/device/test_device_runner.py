"""Generations on the device equal those on the CPU, token for token, whatever proposes."""

import dataclasses
from typing import Any

import pytest

from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling

PROMPT = "the sun rose over the sea and the sun"
PROPOSERS = [
    "none",
    "ngram",
    *("draft_model", "draft_model_tree", "medusa", "medusa_tree", "eagle", "eagle_tree", "eagle3", "eagle3_tree"),
    *("early_exit", "early_exit_tree", "ngram+draft_model_tree"),
]


def request_of(runner: Runner, **settings: Any) -> Request:
    return Request(runner.encode(PROMPT), max_tokens=24, **settings)


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0, seed=1), Sampling(1.0, top_p=0.9, seed=7)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_plain_decoding_on_the_cpu(
    proposer: str, k: int, sampling: Sampling, device_runner: Runner, reference_runner: Runner
) -> None:
    request = request_of(device_runner, sampling=sampling, proposer=proposer, k=k)
    plain = dataclasses.replace(request, proposer="none")
    assert device_runner.generate(request).ids == reference_runner.generate(plain).ids
