"""`specrun verify`: it passes for a sound runner, and fails for each fault that it is there to find."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specrun.engines.manifest import Bundle
from specrun.runner import acceptor, noise
from specrun.runner import logits as logits_module
from specrun.runner.cli import run
from specrun.runner.proposers.draft_model import DraftModel
from specrun.runner.runner import Runner
from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal, Verdict
from specrun.runner.verify import Verification, runs_of, uniformity, verify

PROMPTS = ["the serving of serving of serving"]
PADDING_ID = 310  # the tiny models have an embedding for it, and no tokenizer's token


def failed(result: Verification) -> list[str]:
    assert result.passed == all(check.passed for check in result.checks)
    return [check.name for check in result.checks if not check.passed]


def test_a_sound_bundle_passes(
    heads_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], heads_runner: Runner
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    assert run(["verify", str(heads_bundle.path), "--set", str(prompts), "--max-tokens", "24", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"]
    assert len(result["checks"]) == 7
    assert {report["proposer"] for report in result["proposers"]} == set(heads_runner.proposers)
    for report in result["proposers"]:
        assert report["runs"] == report["identical"] == 12
        assert report["accepted"] > 0


def test_the_table_names_proposers_and_checks(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    assert run(["verify", str(bundle.path), "--set", str(prompts), "--max-tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["proposer", "runs", "identical", "by", "rounding", "tokens", "proposed", "accepted"]
    assert any(line.startswith("ngram+draft_model_tree ") for line in lines)
    assert sum(line.startswith("ok ") for line in lines) == 7


def test_progress_reaches_the_end(runner: Runner) -> None:
    done: list[None] = []
    verify(runner, PROMPTS, 4, progress=lambda: done.append(None))
    assert len(done) == runs_of(runner, len(PROMPTS))


def test_accepting_too_much_fails(twin_runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the restart: the other process does not have the fault."""

    def lenient(proposal: Proposal, logits: np.ndarray[Any, Any], chooser: Chooser, position: int) -> Verdict:
        if not proposal.tokens or len(set(proposal.parents)) < len(proposal.parents):
            return acceptor.accept(proposal, logits, chooser, position)
        return Verdict(tuple(range(len(proposal.tokens))), chooser.choose(logits[-1], position + len(proposal.tokens)))

    monkeypatch.setattr(logits_module, "accept", lenient)
    monkeypatch.setattr(DraftModel, "propose", always([65, 66]))
    names = failed(verify(twin_runner, PROMPTS, 16))
    assert "the same tokens, greedy and seeded, whatever the proposer and k" in names
    assert "the same tokens after a restart" in names


def test_a_draft_that_is_never_accepted_is_reported(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known faults 14 to 16: nothing is wrong with the output, all is wrong with the draft."""
    monkeypatch.setattr(DraftModel, "propose", always([PADDING_ID, PADDING_ID]))
    result = verify(runner, PROMPTS, 24)
    assert failed(result) == ["what is proposed is accepted now and then"]
    (check,) = (check for check in result.checks if not check.passed)
    assert check.found.startswith("never: draft_model, draft_model_tree")


def test_another_distribution_fails(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known faults 9 and 23: noise of half the size, as if at half the temperature; consistent, so all is equal."""
    real = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", lambda words: real(words) * np.float32(0.5))
    names = failed(verify(runner, PROMPTS * 2, 48))
    assert "tokens over seeds follow the model's distribution (coupled rule)" in names


def test_uniformity_is_kolmogorovs_and_smirnovs() -> None:
    rng = np.random.default_rng(0)
    for shape in (1.0, 1.0, 1.05, 1.2):
        sample = rng.random(2_000) ** shape
        assert uniformity(sample) == pytest.approx(stats.kstest(sample, "uniform").pvalue, rel=0.05, abs=1e-6)
    assert uniformity(np.array([0.1, np.inf])) < 1


def always(tokens: list[int]) -> Callable[..., Proposal]:
    def propose(self: DraftModel, committed: list[int], limit: int, chooser: Chooser) -> Proposal:
        return Proposal.chain(tokens[:limit])

    return propose
