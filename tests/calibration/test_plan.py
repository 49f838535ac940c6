"""The search for smoothing and scales, on products made for it."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from specrun.calibration.plan import MAX_ERROR, Plan, make_plan, quantize_columns
from specrun.calibration.products import Activation, Graph
from specrun.calibration.w8a8 import SIGNED, UNSIGNED, Encoding, quantize_products
from specrun.calibration.weights import quantize_weights
from specrun.engines import ort

Array = np.ndarray[Any, Any]
CHANNELS, COLUMNS = 64, 48


def save_graph(path: Path, tied: bool = False) -> Path:
    """x -> RMSNormalization -> MatMul -> Mul with x -> MatMul; `tied`: the last weights are transposed in the graph."""
    rng = np.random.default_rng(0)
    weights = {
        "norm.weight": rng.uniform(0.5, 1.5, CHANNELS),
        "first": rng.normal(0, 0.1, (CHANNELS, CHANNELS)),
        "second": rng.normal(0, 0.1, (COLUMNS, CHANNELS) if tied else (CHANNELS, COLUMNS)),
    }
    nodes = [
        helper.make_node("RMSNormalization", ["x", "norm.weight"], ["normed"], name="norm", axis=-1),
        helper.make_node("MatMul", ["normed", "first"], ["hidden"], name="first product"),
        helper.make_node("Mul", ["hidden", "x"], ["gated"], name="gate"),
        *([helper.make_node("Transpose", ["second"], ["turned"], name="turn", perm=[1, 0])] if tied else []),
        helper.make_node("MatMul", ["gated", "turned" if tied else "second"], ["y"], name="second product"),
    ]
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", CHANNELS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", COLUMNS])],
        [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    return path


def rows(outlier: float = 1.0, seed: int = 1) -> Array:
    """float32 [200, CHANNELS], one channel of them larger than the others."""
    values = np.random.default_rng(seed).normal(0, 1, (200, CHANNELS)).astype(np.float32)
    values[:, 7] *= outlier
    return values


def normed(x: Array, graph: Graph) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * graph.weights("norm.weight"), np.float32)


def activation(values: Array) -> Activation:
    return Activation(np.abs(values).max(0), values)


def plan_of(graph: Graph, x: Array) -> Plan:
    first = normed(x, graph)
    gated = (first @ graph.weights("first")) * x
    return make_plan(graph, {"normed": activation(first), "gated": activation(gated)}, lambda done: None)


def run(path: Path, x: Array) -> Array:
    return np.asarray(onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0])


def test_outliers_are_smoothed_where_a_normalization_can_take_them(tmp_path: Path) -> None:
    graph = Graph(save_graph(tmp_path / "graph.onnx"))
    plan = plan_of(graph, rows(outlier=30.0))
    assert plan["normed"].strength > 0
    assert plan["normed"].factors[7] == plan["normed"].factors.max()
    assert plan["gated"].strength == 0  # a product comes before it
    plain = make_plan(graph, {"normed": activation(normed(rows(), graph)), "gated": activation(rows())}, print)
    assert plan["normed"].error < 20 * plain["normed"].error


def test_a_few_huge_rows_do_not_hide_that_the_others_are_lost(tmp_path: Path) -> None:
    """As in the product behind a model's first token: without it everything is small."""
    graph = Graph(save_graph(tmp_path / "graph.onnx"))
    values = rows()
    values[::50] *= 3000
    plan = make_plan(graph, {"normed": activation(rows()), "gated": activation(values)}, lambda done: None)
    assert plan["gated"].error > 0.5
    assert not plan["gated"].quantized
    assert plan["normed"].quantized


def test_a_weight_that_others_read_is_not_smoothed(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "graph.onnx")
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("normed", TensorProto.FLOAT, ["rows", CHANNELS]))
    onnx.save(model, path)
    graph = Graph(path)
    assert plan_of(graph, rows(outlier=30.0))["normed"].strength == 0


@pytest.mark.parametrize("encoding", [UNSIGNED, SIGNED])
def test_both_encodings_mean_the_same_numbers(encoding: Encoding, tmp_path: Path) -> None:
    path, x = save_graph(tmp_path / "graph.onnx"), rows(outlier=10.0)
    exact = run(path, x)
    graph = Graph(path)
    plan = plan_of(graph, x)
    quantize_products(graph, plan, encoding)
    graph.save(tmp_path / "quantized.onnx")
    got = run(tmp_path / "quantized.onnx", x)
    assert plan["normed"].quantized
    kinds = [node.op_type for node in graph.model.graph.node]
    assert kinds.count("QuantizeLinear") == sum(each.quantized for each in plan.values())
    error = ((got - exact) ** 2).sum(-1) / (exact**2).sum(-1)
    assert 0 < error.mean() < 4 * MAX_ERROR
    if encoding == SIGNED:
        unsigned = Graph(path)
        quantize_products(unsigned, plan, UNSIGNED)
        unsigned.save(tmp_path / "unsigned.onnx")
        assert np.allclose(got, run(tmp_path / "unsigned.onnx", x), rtol=1e-5, atol=1e-5)


def test_compiled_products_compute_in_integers(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "graph.onnx")
    graph = Graph(path)
    quantize_products(graph, {"normed": plan_of(graph, rows())["normed"]}, UNSIGNED)
    quantize_weights(graph, 8, 16)
    graph.save(tmp_path / "quantized.onnx")
    ort.compile_graph(tmp_path / "quantized.onnx", tmp_path / "engine.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "engine.onnx", load_external_data=False).graph.node]
    assert kinds.count("MatMulIntegerToFloat") == kinds.count("MatMulNBits") == 1
    assert "MatMul" not in kinds


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_a_tied_head_are_quantized_too(bits: int, tmp_path: Path) -> None:
    path, x = save_graph(tmp_path / "graph.onnx", tied=True), rows()
    graph = Graph(path)
    quantize_weights(graph, bits, 16)
    graph.save(tmp_path / "quantized.onnx")
    kinds = [node.op_type for node in graph.model.graph.node]
    assert kinds.count("MatMulNBits") == 2
    assert "Transpose" not in kinds
    exact, got = run(path, x), run(tmp_path / "quantized.onnx", x)
    error = (((got - exact) ** 2).sum(-1) / (exact**2).sum(-1)).mean()
    assert error < (2e-4 if bits == 8 else 0.03)
    assert np.array_equal(got[:5], run(tmp_path / "quantized.onnx", x[:5]))  # no row depends on the others


def test_columns_have_scales_of_their_own() -> None:
    weights = np.array([[1.0, 100.0, 0.0], [-2.0, 50.0, 0.0]], np.float32)
    levels, scales = quantize_columns(weights)
    assert levels.tolist() == [[64, 127, 0], [-127, 64, 0]]
    assert np.allclose(scales, [2 / 127, 100 / 127, 1])


def test_quantizing_leaves_the_logging_of_others_alone(tmp_path: Path) -> None:
    """In a process of its own: ONNX Runtime's quantizer sets up the root logger when it is imported."""
    path = save_graph(tmp_path / "graph.onnx")
    script = """
        import logging, sys
        from pathlib import Path
        from specrun.calibration.products import Activation, Graph
        from specrun.calibration.weights import quantize_weights
        quantize_weights(Graph(Path(sys.argv[1])), 8, 16)
        root = logging.getLogger()
        assert not root.handlers, root.handlers
        assert root.level == logging.WARNING, root.level
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
