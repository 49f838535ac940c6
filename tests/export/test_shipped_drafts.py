"""The trained drafts that come with the project: complete, small enough, and described."""

from pathlib import Path

import pytest
import torch

from specrun.export.eagle_layout import TargetShape
from specrun.export.heads import HeadCheckpoint

DRAFTS = Path(__file__).parents[2] / "drafts"
MAX_BYTES = 40_000_000
SMOLLM2 = TargetShape("smollm2-135m", 30, 576, torch.zeros(49_152, 576), torch.zeros(49_152, 576))


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_draft_fits_its_target_and_has_a_card(kind: str) -> None:
    checkpoint = HeadCheckpoint.recognize(DRAFTS / f"smollm2-135m-{kind}")
    assert checkpoint is not None
    assert checkpoint.kind == kind
    head = checkpoint.load(SMOLLM2)
    assert head.vocabulary is not None
    assert 4_096 <= len(head.vocabulary) <= 8_192
    card = (checkpoint.directory / "README.md").read_text()
    assert "conversations that were kept from training" in card
    assert f"{len(head.vocabulary):,} tokens" in card


def test_drafts_are_small() -> None:
    assert sum(file.stat().st_size for file in DRAFTS.rglob("*")) <= MAX_BYTES
