"""Every family that export claims to handle: a tiny random model of each equals PyTorch and builds in TensorRT-RTX.

The validation inside export compares values (chunks, rollback, ragged batch, tree); here is looked at what it wrote.
"""

import sys
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

FAMILIES = tiny.family_configs()
NORMS_PER_LAYER = {
    "qwen3": 4,
    "gemma2": 4,
    "gemma3_text": 6,
    "olmo2": 4,
    "cohere": 1,
    "gpt2": 0,
    "gpt_neox": 0,
    "opt": 0,
}
NO_ROTARY = {"gpt2", "opt", "cohere"}  # Cohere's is of the interleaved kind, which the fusion does not know


def export(family: str, directory: Path, precision: str, width: int | None, capacity: int | None) -> Path:
    checkpoint = tiny.save_checkpoint(directory / "model", tiny.make_model(FAMILIES[family]))
    export_model(Checkpoint.open(str(checkpoint), directory), directory / "export", precision, width, capacity)
    return directory / "export"


def check_operators(family: str, kinds: Counter[str], rotary: int) -> None:
    norms = NORMS_PER_LAYER.get(family, 2)
    assert kinds["TensorScatter"] == 4
    assert kinds["Attention"] == (0 if family == "gemma2" else 2)  # TensorRT's has no soft cap
    assert kinds["RMSNormalization"] == (2 * norms + 1 if norms else 0)
    assert kinds["RotaryEmbedding"] == rotary


def test_every_tested_family_is_tested() -> None:
    assert {config.model_type for config in FAMILIES.values()} == TESTED_FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_export_equals_pytorch(family: str, tmp_path: Path) -> None:
    directory = export(family, tmp_path, "fp32", None, None)
    graph = onnx.load(directory / ENGINE_FILE, load_external_data=False).graph
    assert {node.domain for node in graph.node} == {""}
    check_operators(family, Counter(node.op_type for node in graph.node), 0 if family in NO_ROTARY else 4)
    model = ExportCard.read(directory).model
    assert model.vocabulary_size == tiny.VOCABULARY_SIZE
    assert model.signature.vocab_size == 320
    assert model.stop_token_ids == (tiny.VOCABULARY_SIZE - 1,)


@pytest.mark.skipif(sys.platform != "linux", reason="tensorrt_rtx is a test dependency on Linux only")
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_builds_in_tensorrt_rtx(family: str, tmp_path: Path) -> None:
    """Capacity pinned, no GPU needed; attention and cache update become native layers."""
    import tensorrt_rtx as trt

    path = export(family, tmp_path, "fp16", 5, 128) / ENGINE_FILE
    kinds = Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)
    check_operators(family, kinds, 0 if family in NO_ROTARY | {"olmo2"} else 4)  # OLMo 2 rotates in fp32
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse_from_file(str(path))
    assert parsed, [parser.get_error(index).desc() for index in range(parser.num_errors)]
    layers = Counter(network.get_layer(index).type.name for index in range(network.num_layers))
    assert layers["KV_CACHE_UPDATE"] == kinds["TensorScatter"]
    assert layers["ATTENTION_INPUT"] == kinds["Attention"]
    assert layers["ROTARY_EMBEDDING"] == kinds["RotaryEmbedding"]
    engine = builder.build_serialized_network(network, builder.create_builder_config())
    assert engine is not None
    assert engine.nbytes > 100_000
