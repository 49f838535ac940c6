"""Products in 8 bits are the same numbers on every processor."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession

from specrun.engines import ort
from specrun.engines.processor import sums_8_bit_products_exactly

CHANNELS, COLUMNS = 64, 32


@pytest.mark.parametrize(
    ("machine", "flags", "exact"),
    [
        ("x86_64", "fpu avx2 fma", False),
        ("x86_64", "fpu avx2 avx512f avx512bw", False),
        ("x86_64", "fpu avx2 avx512f avx512_vnni", True),
        ("AMD64", "fpu avx2 avx_vnni", True),
        ("aarch64", None, True),
    ],
)
def test_which_processors_are_exact(machine: str, flags: str | None, exact: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    feature = f"flags\t\t: {flags}" if flags else "Features\t: asimd"
    cpuinfo.write_text(f"processor\t: 0\n{feature}\n")
    assert sums_8_bit_products_exactly(machine, cpuinfo) == exact


def test_an_unknown_x86_processor_is_not_trusted(tmp_path: Path) -> None:
    assert not sums_8_bit_products_exactly("x86_64", tmp_path / "none")


@pytest.mark.parametrize("width", [1, 2, 5, 17])
def test_the_largest_products_do_not_overflow(width: int, tmp_path: Path) -> None:
    """Two of them exceed 16 bits."""
    rng = np.random.default_rng(0)
    weights = rng.choice(np.array([-127, 127], np.int8), (CHANNELS, COLUMNS))
    levels = rng.choice(np.array([-127, 127], np.float32), (width, CHANNELS))
    engine = _compiled(weights, tmp_path)
    (got,) = engine.run(None, {"x": levels})
    np.testing.assert_array_equal(got, levels @ weights.astype(np.float32))


def _compiled(weights: "np.ndarray[tuple[int, int], np.dtype[np.int8]]", directory: Path) -> InferenceSession:
    """An engine with one product, both sides of it in 8 bits with a scale of one."""
    initializers: dict[str, np.ndarray[Any, Any]] = {
        "scale": np.array(1, np.float32),
        "zero": np.array(128, np.uint8),
        "weights": weights,
        "scales": np.ones(COLUMNS, np.float32),
        "zeros": np.zeros(COLUMNS, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["levels"]),
        helper.make_node("DequantizeLinear", ["levels", "scale", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["weights", "scales", "zeros"], ["matrix"], axis=1),
        helper.make_node("MatMul", ["rounded", "matrix"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", CHANNELS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, directory / "g.onnx")
    ort.compile_graph(directory / "g.onnx", directory / "engine.onnx")
    assert ort.PRODUCT_IN_8_BITS in (directory / "engine.onnx").read_bytes()
    return ort.load_engine(directory / "engine.onnx")
