"""How well drafts are said to guess, and what the gate makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.calibration.quality import QualityError, require_acceptance
from specrun.engines.acceptance import Reading, guess_of_head, tokens_per_round
from specrun.engines.manifest import DRAFT_MODEL, EAGLE, EAGLE3, MEDUSA, QUANTIZATION_REPORT, Acceptance
from specrun.runner.runner import Runner
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.session import feed
from tests import tiny

TEXT = "the serving number of the nose and the tide rose over the sea"


@pytest.mark.parametrize("kind", [MEDUSA, EAGLE, EAGLE3])
def test_guesses_on_a_text_are_those_of_the_proposer(kind: str, heads_runner: Runner) -> None:
    """The head's own first guess at each position of a text, read at once, as when it drafts token by token."""
    bundle = heads_runner.bundle
    target, entry = bundle.manifest.target, bundle.manifest.heads[kind]
    text = list(heads_runner.encode(TEXT))[:24]
    reading = Reading.of(bundle.engine("target"), target.signature, [text], target.vocabulary_size)
    guess = guess_of_head(kind, bundle.path / kind, entry, target)
    (states,) = reading.states
    guesses = guess(text, states)
    assert len(guesses) == len(text) - 1
    chooser = Chooser(Sampling(seed=0))
    for at in range(len(text) - 1):
        proposer = heads_runner._drafts.proposer(kind, nodes=1, p_min=0.0)
        heads_runner.target.truncate(0)
        proposer.start()
        proposer.observe(feed(heads_runner.target, text[: at + 1]).hidden)
        assert proposer.propose(text[: at + 2], 1, chooser).tokens == (guesses[at],)


def test_the_targets_choices_are_those_of_plain_decoding(heads_runner: Runner) -> None:
    bundle = heads_runner.bundle
    target = bundle.manifest.target
    text = list(heads_runner.encode(TEXT))[:24]
    (choices,) = Reading.of(bundle.engine("target"), target.signature, [text], target.vocabulary_size).choices
    heads_runner.target.truncate(0)
    logits = feed(heads_runner.target, text, wanted=None).logits
    assert choices.tolist() == [int(logits.row(index).argmax()) for index in range(len(text))]


def test_agreement_is_the_share_of_hits() -> None:
    choices = np.array([4, 5, 6, 7])
    reading = Reading([[1, 2, 3, 4]], [choices], [None])
    assert reading.agreement(lambda text, states: np.array([4, 0, 6, 0])) == 0.5
    assert reading.agreement(lambda text, states: np.array([6, 0])) == 0.5  # for the last two positions
    assert tokens_per_round(1.0, 4) == 5
    assert tokens_per_round(0.5, 2) == 1.75
    assert tokens_per_round(0.0, 4) == 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{TEXT} {number}\n" for number in range(100)))
    return file


def test_a_twin_draft_guesses_everything_before_and_after(target_checkpoint: Path, text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "int8-weights", "text": text, "accept_quality_loss": True, "k": 3}
    bundle = tiny.make_bundle(tmp_path, target_checkpoint, target_checkpoint, **options)
    assert bundle.manifest.acceptance == {DRAFT_MODEL: Acceptance(reference=4.0, quantized=4.0)}
    page = (bundle.path / QUANTIZATION_REPORT).read_text()
    assert "<td>draft_model</td><td>4.00</td>" in page


def test_a_draft_that_guesses_worse_is_refused() -> None:
    require_acceptance(Acceptance(2.0, 1.91), "eagle3", "int8")
    with pytest.raises(
        QualityError, match=r"eagle3 promises 1.80 tokens per round instead of 2.00; expected at most 5 %"
    ):
        require_acceptance(Acceptance(2.0, 1.8), "eagle3", "int8")
