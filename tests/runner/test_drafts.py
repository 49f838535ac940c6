"""Every kind of draft on ONNX Runtime: lossless, and really the draft it claims to be."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrun.engines.manifest import Bundle
from specrun.export.checkpoint import Checkpoint
from specrun.export.contract import recorded_states
from specrun.export.heads import HeadCheckpoint, target_shape
from specrun.runner.compare import compare
from specrun.runner.draft_sessions import DraftSessions
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Chooser, Sampling
from tests import tiny, tiny_heads
from tests.runner.test_runner import SAMPLINGS

PROMPT = tuple(tiny.make_tokenizer().encode("the serving of serving of serving").ids)
KINDS = ["medusa", "eagle", "eagle3", "early_exit", "draft_model"]
PROPOSERS = [
    *(name for kind in KINDS for name in (kind, f"{kind}_tree")),
    *("ngram+eagle3_tree", "ngram+draft_model", "ngram+medusa", "ngram+early_exit_tree"),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_plain_decoding(proposer: str, k: int, sampling: Sampling, heads_runner: Runner) -> None:
    """Known faults 1, 3, 12, 22 and 23."""
    request = Request(PROMPT, max_tokens=40, sampling=sampling, proposer=proposer, k=k)
    result = compare(heads_runner, request, repeats=1)
    assert result.identical, result.divergence
    assert result.speculative.text == result.plain.text
    assert result.speculative.statistics.proposed > 0


@pytest.mark.parametrize("proposer", ["eagle3_tree", "early_exit_tree", "medusa_tree", "draft_model_tree"])
@pytest.mark.parametrize("room", range(1, 8))
def test_a_tree_fits_into_what_is_left_of_the_context(proposer: str, room: int, heads_runner: Runner) -> None:
    """Known fault 4."""
    prompt = (PROMPT * 20)[: 256 - room]
    request = Request(prompt, max_tokens=1_000, proposer=proposer, k=4)
    completion = heads_runner.generate(request)
    assert completion.ids == heads_runner.generate(request.plain()).ids
    assert len(completion.ids) == room or completion.finish_reason == "stop"


def test_a_draft_steps_in_where_lookup_finds_nothing(heads_runner: Runner) -> None:
    """Each round is the lookup's, as wide as a verification, or the draft's, with the k that it was built for."""
    request = Request(PROMPT * 3, max_tokens=60)
    manifest = heads_runner.bundle.manifest
    counts = {}
    for name in ("ngram", "eagle3", "ngram+eagle3"):
        statistics = heads_runner.generate(dataclasses.replace(request, proposer=name)).statistics
        counts[name] = statistics.proposed_at
    assert max(counts["eagle3"]) == manifest.k - 1
    assert max(counts["ngram"]) == max(counts["ngram+eagle3"]) == manifest.nodes - 1
    assert counts["ngram+eagle3"][0] > counts["ngram"][0]


def test_all_drafts_take_turns_in_one_bundle(heads_runner: Runner) -> None:
    """No draft leaves anything behind in the caches that the next request would see."""
    request = Request(PROMPT, max_tokens=30, sampling=Sampling(temperature=1.0, seed=5), k=3)
    plain = heads_runner.generate(request.plain()).ids
    for name in (*PROPOSERS, *reversed(PROPOSERS)):
        assert heads_runner.generate(dataclasses.replace(request, proposer=name)).ids == plain, name


def test_full_exit_is_always_accepted(tmp_path: Path, deep_checkpoint: Path) -> None:
    """An early exit that leaves out only a layer without effect is the target."""
    model = Checkpoint.open(str(deep_checkpoint), tmp_path).load(torch.float32)
    for parameter in (model.model.layers[6].self_attn.o_proj.weight, model.model.layers[6].mlp.down_proj.weight):
        parameter.data.zero_()
    target = tiny.save_checkpoint(tmp_path / "target", model)
    bundle = tiny.make_bundle(tmp_path / "bundle", target, "skip:6")
    assert (bundle.path / "target" / "early_exit.onnx").is_file()
    assert not (bundle.path / "target" / "early_exit.onnx.data").exists()  # all its weights are the target's
    runner = Runner(bundle)
    for sampling in SAMPLINGS[:3]:
        result = compare(runner, Request(PROMPT, 40, sampling, proposer="early_exit", k=4), repeats=1)
        assert result.identical
        statistics = result.speculative.statistics
        assert statistics.accepted_at == statistics.proposed_at


def first_proposal(bundle: Bundle, kind: str, tokens: list[int], runner: Runner) -> tuple[int, ...]:
    """What the draft proposes after `tokens`, in the middle of a generation: the target has read all but the last."""
    found: list[tuple[int, ...]] = []
    make = DraftSessions.proposer

    def spying(self: DraftSessions, name: str, nodes: int, p_min: float) -> Any:
        proposer = make(self, name, nodes, p_min)
        propose = proposer.propose

        def recording(known: list[int], limit: int, chooser: Chooser) -> Any:
            proposal = propose(known, limit, chooser)
            if known == tokens:
                found.append(proposal.tokens)
            return proposal

        proposer.propose = recording  # type: ignore[assignment,method-assign]
        return proposer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftSessions, "proposer", spying)
        runner.generate(Request(PROMPT, max_tokens=len(tokens) - len(PROMPT) + 6, proposer=kind, k=4))
    return found[0]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_head_guesses_what_pytorch_guesses_from_the_targets_states(
    kind: str, heads_bundle: Bundle, heads_runner: Runner, deep_checkpoint: Path, tmp_path: Path
) -> None:
    """Known fault 16: a tap, a row or a position that is off by one changes the guesses."""
    checkpoint = Checkpoint.open(str(deep_checkpoint), tmp_path)
    model = checkpoint.load(torch.float32)
    maker = {"eagle": tiny_heads.eagle1, "eagle3": tiny_heads.eagle3, "medusa": tiny_heads.medusa}[kind]
    recognized = HeadCheckpoint.recognize(maker(tmp_path / kind))
    assert recognized is not None
    head = recognized.load(target_shape(checkpoint))
    written = list(heads_runner.generate(Request(PROMPT, max_tokens=12, proposer="none")).ids)
    # The first round after the prompt, and one round later on: the caches were refreshed in between.
    rounds = [list(PROMPT)]
    rounds.append([*PROMPT, *written[:1]])
    for tokens in rounds:
        with torch.no_grad(), recorded_states(model) as states:
            model(input_ids=torch.tensor([tokens[:-1]]))
        usable = [*states[:-2], states[-1]]
        hidden = torch.cat([usable[tap] for tap in head.taps], -1)
        wanted = medusa_chain(head, hidden) if kind == "medusa" else eagle_chain(head, hidden, tokens)
        got = first_proposal(heads_bundle, kind, tokens, heads_runner)
        assert list(got) == wanted[: len(got)]
        assert len(got) >= 3


@torch.no_grad()
def medusa_chain(head: Any, hidden: torch.Tensor) -> list[int]:
    return [int(token) for token in head.module(hidden[:, -1:])[0, 0, :, : tiny.VOCABULARY_SIZE].argmax(-1)]


@torch.no_grad()
def eagle_chain(head: Any, hidden: torch.Tensor, tokens: list[int]) -> list[int]:
    """Greedy, the whole sequence again for every token."""
    features, line = head.module.fuse(hidden), tokens[1:]
    head.module.config._attn_implementation = "sdpa"
    guesses: list[int] = []
    for _ in range(4):
        rows = len(line)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]
        states = head.module.states(torch.tensor([line]), features, torch.arange(rows)[None], causal, None)
        logits = head.module.logits(states)[0, -1]
        if head.vocabulary is None:
            guess = int(logits[: tiny.VOCABULARY_SIZE].argmax())
        else:
            guess = int(head.vocabulary[logits.argmax()])
        guesses.append(guess)
        line = [*line, guess]
        features = torch.cat([features, states[:, -1:]], 1)
    return guesses


def test_layers_of_a_bundle_agree_on_what_is_tapped(heads_bundle: Bundle) -> None:
    manifest = heads_bundle.manifest
    assert manifest.target.signature.taps == (2, 4, 5, 8)
    assert manifest.heads["eagle3"].taps == (2, 4, 5)
    assert manifest.heads["medusa"].taps == manifest.heads["eagle"].taps == (8,)
    assert manifest.heads["early_exit"].signature is not None
    assert manifest.heads["early_exit"].signature.skipped == (6, 7)
    assert manifest.proposer == "ngram+medusa_tree"
    ids = np.load(heads_bundle.model_file("eagle3", "vocabulary.npy"))
    assert ids.tolist() == tiny_heads.DRAFT_IDS.tolist()
