"""Every family that export claims to handle: a tiny random model of it equals PyTorch, and is refused where it must."""

from collections import Counter
from pathlib import Path

import onnx
import pytest

from specrun.engines.card import ExportCard
from specrun.engines.manifest import ENGINE_FILE
from specrun.export.checkpoint import Checkpoint
from specrun.export.family import TESTED_FAMILIES
from specrun.export.graph import export_model
from tests import tiny

ROTARY = {
    "llama",
    "smollm2",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "smollm3",
    "granite",
}
RMS = ROTARY | {"cohere"}
NORMS_PER_LAYER = {"qwen3": 4, "gemma2": 4, "gemma3_text": 6, "olmo2": 4, "cohere": 1}


def test_every_tested_family_is_tested() -> None:
    assert {config.model_type for config in tiny.family_configs().values()} == TESTED_FAMILIES


@pytest.mark.parametrize("family", tiny.family_configs())
def test_export_equals_pytorch(family: str, tmp_path: Path) -> None:
    """The validation inside export compares values: chunks, rollback, ragged batch, tree. Here: what it wrote."""
    config = tiny.family_configs()[family]
    checkpoint = tiny.save_checkpoint(tmp_path / "model", tiny.make_model(config))
    export_model(Checkpoint.open(str(checkpoint), tmp_path), tmp_path / "export", "fp32", None, None)
    graph = onnx.load(tmp_path / "export" / ENGINE_FILE, load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert {node.domain for node in graph.node} == {""}
    assert kinds["TensorScatter"] == 4
    assert kinds["Attention"] == (0 if family == "gemma2" else 2)  # TensorRT's has no soft cap
    assert kinds["RMSNormalization"] == (2 * NORMS_PER_LAYER.get(family, 2) + 1 if family in RMS else 0)
    assert kinds["RotaryEmbedding"] == (4 if family in ROTARY | {"gpt_neox"} else 0)
    card = ExportCard.read(tmp_path / "export")
    assert card.model.vocabulary_size == tiny.VOCABULARY_SIZE
    assert card.model.signature.vocab_size == 320
    assert card.model.stop_token_ids == (tiny.VOCABULARY_SIZE - 1,)
