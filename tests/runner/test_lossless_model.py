"""Losslessness on a real model: `make lossless`. Prints what it found; about half an hour on two cores."""

import dataclasses
from pathlib import Path

import pytest

from specrun.engines.manifest import NGRAM_FIRST, TREE_SUFFIX
from specrun.runner.compare import Divergence, explain
from specrun.runner.prompt_set import PROMPT_SETS, load_prompt_set
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling

BUNDLE = Path("build/bundles/smollm2-135m-all")
KS = (1, 4, 8)
NODES = 16
PROMPTS_PER_SET, TOKENS = 1, 64
SAMPLINGS = [Sampling(seed=0), Sampling(temperature=0.7, seed=1), Sampling(temperature=1.0, top_p=0.9, seed=2)]


@pytest.fixture(scope="module")
def model_runner() -> Runner:
    return Runner.open(BUNDLE)


@pytest.mark.model
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "temperature 0.7", "temperature 1, top-p 0.9"])
def test_smollm2_output_equals_plain_decoding(sampling: Sampling, model_runner: Runner) -> None:
    prompts = [prompt for name in PROMPT_SETS for prompt in load_prompt_set(name)[:PROMPTS_PER_SET]]
    requests = [Request(model_runner.encode_chat(prompt), TOKENS, sampling, nodes=NODES) for prompt in prompts]
    plain = [model_runner.generate(request.plain()).ids for request in requests]
    print(f"\n{sampling}: {len(plain)} prompts, {sum(map(len, plain))} tokens")
    divergences: list[Divergence] = []
    default = model_runner.bundle.manifest.proposer
    for proposer in (*(name for name in model_runner.proposers if not name.startswith(NGRAM_FIRST)), default):
        p_min = None if proposer == default else 0.0  # unsure guesses too: what is rejected must leave no trace
        accepted = proposed = identical = 0
        for k in KS:
            for request, ids in zip(requests, plain, strict=True):
                speculative = dataclasses.replace(request, proposer=proposer, k=k, p_min=p_min)
                completion = model_runner.generate(speculative)
                accepted += completion.statistics.accepted_at.total()
                proposed += completion.statistics.proposed
                identical += completion.ids == ids
                if completion.ids != ids:
                    divergences.append(explain(model_runner, speculative, ids, completion.ids))
                    print(f"    {proposer}, k = {k}: {divergences[-1]}")
        shape = f", {NODES} nodes" if proposer.endswith(TREE_SUFFIX) else ""
        print(
            f"  {proposer}, k in {KS}{shape}: {identical} of {len(KS) * len(plain)} identical, "
            f"{accepted} of {proposed} drafted tokens accepted",
            flush=True,
        )
        assert accepted > 0
    assert all(divergence.within_rounding for divergence in divergences)
