"""What ONNX Runtime's optimizer leaves undone on a CPU: additions that a normalization follows, and logits of rows that
nobody reads."""

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specrun.engines.joined_products import constant, producer
from specrun.engines.signature import BATCH, CACHE_LENGTH, LOGIT_ROWS, LOGITS, ROWS

CONTRIB = "com.microsoft"
PRODUCTS = ("MatMul", "MatMulNBits")


def fuse_for_cpu(graph: Path) -> None:
    """Rewrite `graph`, quantized or not, in place; its weights stay where they are."""
    model = ir.load(graph)
    _fuse_additions(model)
    if CACHE_LENGTH in {value.name for value in model.graph.inputs}:
        _select_logit_rows(model.graph)
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    ir.save(model, graph)


def _fuse_additions(model: ir.Model) -> None:
    """A sum and its normalization become one operator that gives both."""
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        addition = producer(norm.inputs[0], "Add")
        if addition is None or not _has_kernel(norm, addition):
            continue
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*addition.inputs, norm.inputs[1]],
            attributes={"epsilon": norm.attributes["epsilon"].as_float()},
            domain=CONTRIB,
            num_outputs=4,
            name=norm.name,
        )
        for unused in fused.outputs[1:3]:  # mean and deviation
            unused.name = ""
        model.graph.insert_before(norm, fused)
        for old, new in ((norm.outputs[0], fused.outputs[0]), (addition.outputs[0], fused.outputs[3])):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.name = f"{old.name}.unfused"
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        model.opset_imports[CONTRIB] = 1


def _has_kernel(norm: ir.Node, addition: ir.Node) -> bool:
    first, second = addition.inputs
    assert first is not None
    assert second is not None
    alike = first.shape is not None and first.shape == second.shape and len(first.shape) == 3
    return alike and first.dtype == ir.DataType.FLOAT and norm.attributes["axis"].as_int() == -1


def _select_logit_rows(graph: ir.Graph) -> None:
    """Give the graph an input that says of which of its tokens logits are wanted."""
    logits = next(value for value in graph.outputs if value.name == LOGITS)
    product = logits.producer()
    while product is not None and product.op_type not in PRODUCTS:
        product = next((value.producer() for value in product.inputs if value is not None and value.producer()), None)
    assert product is not None, "logits that no product makes"
    first, reader = product.inputs[0], product
    while (quantizer := producer(first, "DequantizeLinear") or producer(first, "QuantizeLinear")) is not None:
        first, reader = quantizer.inputs[0], quantizer
    assert first is not None
    rows = ir.Value(name=LOGIT_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([BATCH, ROWS]))
    graph.inputs.append(rows)
    last = constant(graph, ir.tensor([-1], name=f"{LOGIT_ROWS}.last_axis"))
    places = ir.node("Unsqueeze", [rows, last], name=f"{LOGIT_ROWS}/Unsqueeze")
    gathered = ir.node(
        "GatherND", [first, places.outputs[0]], attributes={"batch_dims": 1}, name=f"{LOGIT_ROWS}/GatherND"
    )
    places.outputs[0].name, gathered.outputs[0].name = f"{LOGIT_ROWS}.places", f"{LOGIT_ROWS}.selected"
    gathered.outputs[0].type = first.type
    graph.insert_before(reader, [places, gathered])
    reader.replace_input_with(0, gathered.outputs[0])
    if logits.shape is not None:
        logits.shape = ir.Shape([BATCH, ROWS, logits.shape[2]])
