"""The exported file: what validation catches, static files, precisions, and TensorRT-RTX."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from specrun.engines.card import ExportCard
from specrun.engines.manifest import ENGINE_FILE
from specrun.export.checkpoint import Checkpoint
from specrun.export.graph import ExportOptionError, export_model
from specrun.export.trace import signature_of
from specrun.export.validate import (
    ChunkValuesError,
    GraphNamesError,
    GraphOperatorsError,
    GraphShapesError,
    RaggedBatchValuesError,
    TreeValuesError,
    Trial,
    ValidationError,
    validate_graph,
    validate_values,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, target_checkpoint: Path) -> Path:
    out = tmp_path_factory.mktemp("export") / "export"
    export_model(Checkpoint.open(str(target_checkpoint), out), out, "fp32", None, None)
    return out


def rewire(graph: onnx.GraphProto, operator: str, old: str, new: str) -> None:
    for node in graph.node:
        if node.op_type == operator:
            node.input[:] = [new if name == old else name for name in node.input]


def rename_output(graph: onnx.GraphProto) -> None:
    last = next(node for node in graph.node if "logits" in node.output)
    last.output[:] = ["scores"]
    graph.output[0].name = "scores"


def rename_axis(graph: onnx.GraphProto) -> None:
    graph.input[0].type.tensor_type.shape.dim[1].dim_param = "sequence"


def use_contrib_operator(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if node.op_type == "Sigmoid").domain = "com.microsoft"


def change_weight(graph: onnx.GraphProto) -> None:
    for initializer in graph.initializer:
        if len(initializer.dims) == 2:
            array = numpy_helper.to_array(initializer) * np.float32(1.01)
            initializer.CopyFrom(numpy_helper.from_array(array, initializer.name))


def ignore_tree(graph: onnx.GraphProto) -> None:
    """A causal mask within the call, whatever tree_mask says: right for chains."""
    rewire(graph, "GatherElements", "tree_mask", "chain")
    nodes = [
        helper.make_node("Not", ["tree_mask"], ["not_tree"]),
        helper.make_node("Or", ["tree_mask", "not_tree"], ["all"]),
        helper.make_node("Trilu", ["all"], ["chain"], upper=0),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)


def write_all_rows_at_one_place(graph: onnx.GraphProto) -> None:
    """The longest row's cache length for every row: right for the first row of the batch."""
    rewire(graph, "TensorScatter", "cache_length", "longest")
    nodes = [
        helper.make_node("ReduceMax", ["cache_length"], ["maximum"], keepdims=1),
        helper.make_node("Max", ["cache_length", "maximum"], ["longest"]),
    ]
    for node in reversed(nodes):
        graph.node.insert(0, node)


FAULTS: dict[str, tuple[Callable[[onnx.GraphProto], None], type[ValidationError]]] = {
    "renamed output": (rename_output, GraphNamesError),
    "renamed axis": (rename_axis, GraphShapesError),
    "contrib operator": (use_contrib_operator, GraphOperatorsError),
    "other weights": (change_weight, ChunkValuesError),
    "tree mask ignored": (ignore_tree, TreeValuesError),
    "batch rows mixed up": (write_all_rows_at_one_place, RaggedBatchValuesError),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_validation_names_the_fault(fault: str | None, exported: Path, target_checkpoint: Path, tmp_path: Path) -> None:
    model = Checkpoint.open(str(target_checkpoint), tmp_path).load(torch.float32)
    graph = onnx.load(exported / ENGINE_FILE)
    if fault is not None:
        FAULTS[fault][0](graph.graph)
    path = tmp_path / "model.onnx"
    onnx.save(graph, path)

    def validate() -> None:
        validate_graph(path, signature_of(model), {}, "float32")
        validate_values(path, model, signature_of(model), Trial.of({}, 512))

    if fault is None:
        validate()
    else:
        with pytest.raises(FAULTS[fault][1]):
            validate()


@pytest.mark.parametrize("width", [1, 5, 64])
def test_static_file_has_no_named_axes(width: int, target_checkpoint: Path, tmp_path: Path) -> None:
    export_model(Checkpoint.open(str(target_checkpoint), tmp_path), tmp_path / "static", "fp32", width, 64)
    graph = onnx.load(tmp_path / "static" / ENGINE_FILE).graph
    axes = [axis for value in [*graph.input, *graph.output] for axis in value.type.tensor_type.shape.dim]
    assert all(axis.dim_value > 0 for axis in axes)
    assert "Shape" not in {node.op_type for node in graph.node}
    assert ExportCard.read(tmp_path / "static").pinned == {"batch": 1, "tokens": width, "tree": width, "capacity": 64}


@pytest.mark.parametrize(("width", "capacity"), [(4, None), (None, 64), (0, 64), (65, 64)])
def test_senseless_sizes_are_refused(
    width: int | None, capacity: int | None, target_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportOptionError):
        export_model(Checkpoint.open(str(target_checkpoint), tmp_path), tmp_path / "out", "fp32", width, capacity)
    assert not (tmp_path / "out").exists()
