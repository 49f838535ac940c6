"""Losslessness on a real model: `make lossless`. Prints what it found; about 20 minutes on two cores."""

import dataclasses
from pathlib import Path

import pytest

from specrun.runner.compare import Divergence, explain
from specrun.runner.prompt_set import PROMPT_SETS, load_prompt_set
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling

BUNDLE = Path("build/bundles/smollm2-135m")
KS = (1, 2, 3, 5, 8)
PROMPTS, TOKENS = 20, 128


@pytest.fixture(scope="module")
def model_runner() -> Runner:
    return Runner.open(BUNDLE)


@pytest.mark.model
@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=0), Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)],
    ids=["greedy", "temperature 1", "temperature 1, top-p 0.9"],
)
def test_smollm2_output_equals_plain_decoding(sampling: Sampling, model_runner: Runner) -> None:
    prompts = [prompt for name in PROMPT_SETS for prompt in load_prompt_set(name)][:PROMPTS]
    requests = [Request(model_runner.encode_chat(prompt), TOKENS, sampling, proposer="ngram") for prompt in prompts]
    plain = [model_runner.generate(request.plain()).ids for request in requests]
    tokens = sum(len(ids) for ids in plain)
    print(f"\n{sampling}: {len(plain)} prompts, {tokens} tokens")
    divergences: list[Divergence] = []
    for k in KS:
        accepted, found = 0, []
        for request, ids in zip(requests, plain, strict=True):
            speculative = dataclasses.replace(request, k=k)
            completion = model_runner.generate(speculative)
            accepted += completion.statistics.accepted_at.total()
            if completion.ids != ids:
                found.append(explain(model_runner, speculative, ids, completion.ids))
        print(
            f"  k = {k}: {len(plain) - len(found)} of {len(plain)} identical, {accepted} drafted tokens accepted",
            flush=True,
        )
        for divergence in found:
            print(f"    {divergence}")
        divergences += found
        assert accepted > 0
    assert all(divergence.within_rounding for divergence in divergences)
