"""What `specrun inspect` and `specrun compare` say of bundles."""

import json
from pathlib import Path

import pytest

from specrun.engines.errors import RequestError
from specrun.engines.layers import EngineLayers, Layer
from specrun.engines.manifest import Bundle
from specrun.runner.backend_comparison import compare_backends
from specrun.runner.cli import run
from specrun.runner.inspection import inspect_engines
from specrun.runner.runner import Runner
from tests import tiny

TEXT = "the sun rose over the sea, and the wind came from the land. " * 5


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, target_checkpoint: Path) -> Bundle:
    return tiny.make_bundle(
        tmp_path_factory.mktemp("int8"), target_checkpoint, precision="int8", accept_quality_loss=True
    )


def test_layers_are_counted_and_sizes_are_of_the_files(bundle: Bundle) -> None:
    one, target, draft = inspect_engines(bundle)  # the draft's heads are too small for an engine for one sequence
    assert (one.file, target.file, draft.file) == ("target/model.one.onnx", "target/model.onnx", "draft/model.onnx")
    assert one.counts()["GroupQueryAttention"] == {"fp32": 2}
    files = [bundle.path / "target" / name for name in ("model.onnx", "model.onnx.data")]
    assert target.bytes == sum(file.stat().st_size for file in files)
    counts = target.counts()
    assert counts["Attention"] == {"fp32": 2}
    assert counts["MatMul"] == one.counts()["MatMul"] == {"fp32": 9}
    assert list(counts)[:2] in (["Attention", "MatMul"], ["MatMul", "Attention"])  # what costs most is shown first
    assert target.fell_back == ()


def test_products_that_calibration_left_out_fell_back(quantized: Bundle) -> None:
    for engine in inspect_engines(quantized):
        counts = engine.counts()
        assert counts["MatMulIntegerToFloat"].keys() == {"int8"}
        assert counts["MatMulNBits"].keys() == {"int8 weights"}
        assert len(engine.fell_back) == counts["MatMulNBits"]["int8 weights"]
        assert {layer.type for layer in engine.fell_back} == {"MatMulNBits"}


def test_the_command_prints_a_table_and_json(quantized: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(quantized.path)]) == 0
    text = capsys.readouterr().out
    assert "target/model.onnx: " in text
    assert "ort, int8, calls of any width" in text
    assert "MatMulNBits in int8 weights" in text
    assert run(["inspect", str(quantized.path), "--layers"]) == 0
    assert capsys.readouterr().out.count("RMSNormalization") > text.count("RMSNormalization")
    assert run(["inspect", str(quantized.path), "--json"]) == 0
    _, engine = json.loads(capsys.readouterr().out)
    assert engine["made_of"]["widths"] == []
    assert engine["counts"]["Attention"] == {"fp32": 2}


def test_layers_survive_the_file(tmp_path: Path) -> None:
    layers = EngineLayers((2, 5), 1, 64, (Layer("a", "MATRIX_MULTIPLY", "fp16"), Layer("b", "SHAPE", "")))
    layers.write(tmp_path / "model.engine")
    assert EngineLayers.read(tmp_path / "model.engine") == layers


def test_a_bundle_compared_with_itself_is_the_same(runner: Runner, bundle: Bundle) -> None:
    ids = [runner.encode(TEXT), runner.encode("a")]
    found = compare_backends([runner, Runner(bundle)], ids)
    assert [each.tokens for each in found] == [min(192, len(ids[0])), 1]
    for each in found:
        assert (each.agreement, each.largest_difference) == (1.0, 0.0)
        assert each.largest_logit > 1


def test_precisions_differ_a_little(runner: Runner, quantized: Bundle) -> None:
    (found,) = compare_backends([runner, Runner(quantized)], [runner.encode(TEXT)])
    assert 0.5 < found.agreement <= 1
    assert 0 < found.mean_difference < found.largest_difference < found.largest_logit


def test_other_models_are_not_compared(runner: Runner, heads_runner: Runner) -> None:
    with pytest.raises(RequestError, match="expected the same model twice"):
        compare_backends([runner, heads_runner], [[1, 2]])


def test_compare_prints_a_line_a_prompt(
    bundle: Bundle, quantized: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the sun rose over the sea\nthe wind came from the land\n")
    assert run(["compare", str(bundle.path), str(quantized.path), "--set", str(prompts)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": ort, fp32")
    assert lines[1].endswith(": ort, int8")
    assert len(lines) == 6
    assert run(["compare", str(bundle.path), str(quantized.path), "--set", str(prompts), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
