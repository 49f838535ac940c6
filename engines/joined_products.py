"""Matrix products that read the same activation become one: query, key and value; gate and up.

Every column keeps its weights, so the numbers stay the same; a call starts fewer kernels, and each has more to do. Only
for ONNX Runtime's CPU provider: TensorRT joins products by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

HEADS_FIRST = (0, 2, 1, 3)  # [batch, tokens, heads, head_dim] -> [batch, heads, tokens, head_dim]


def join_products(graph: Path, joined: Path) -> None:
    """Write `graph`, an exported one, with joined products to `joined`, its weights beside it."""
    model = ir.load(graph)
    for attention in [node for node in model.graph if node.op_type == "Attention"]:
        _join_heads(model.graph, attention)
    RemoveUnusedNodesPass()(model)  # or the parts of what was joined would be joined again
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        if _is_product(node):
            assert node.inputs[0] is not None
            readers.setdefault(node.inputs[0], []).append(node)
    for products in readers.values():
        if len(products) > 1:
            _join(model.graph, products)
    RemoveUnusedNodesPass()(model)
    model.graph.sort()  # what was joined stands where the first of its parts stood
    ir.save(model, joined, external_data=f"{joined.name}.data")


def producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    """The node that computes `value`, if it is an `operator`."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


@dataclass(frozen=True)
class _Heads:
    """How queries, keys or values come from a product: perhaps with a bias, reshaped, transposed, perhaps rotated."""

    product: ir.Node
    bias: ir.Value | None
    reshape: ir.Node
    transpose: ir.Node
    rotary: ir.Node | None

    @classmethod
    def of(cls, value: ir.Value | None) -> "_Heads | None":
        rotary = producer(value, "RotaryEmbedding")
        transpose = producer(value if rotary is None else rotary.inputs[0], "Transpose")
        if transpose is None or tuple(transpose.attributes["perm"].as_ints()) != HEADS_FIRST:
            return None
        reshape = producer(transpose.inputs[0], "Reshape")
        if reshape is None:
            return None
        addition = producer(reshape.inputs[0], "Add")
        biased, bias = (reshape.inputs[0], None) if addition is None else _value_and_bias(addition)
        product = producer(biased, "MatMul")
        if product is None or not _is_product(product):
            return None
        inner = [product.outputs[0], reshape.outputs[0], transpose.outputs[0]]
        if reshape.inputs[0] is not None:
            inner.append(reshape.inputs[0])
        if any(len(each.uses()) > 1 or each.is_graph_output() for each in inner):
            return None
        return cls(product, bias, reshape, transpose, rotary)

    def rotates_like(self, other: "_Heads") -> bool:
        if self.rotary is None or other.rotary is None:
            return False
        attributes = [
            {name: each.value for name, each in node.attributes.items() if name != "num_heads"}
            for node in (self.rotary, other.rotary)
        ]
        return self.rotary.inputs[1:] == other.rotary.inputs[1:] and attributes[0] == attributes[1]


def _join_heads(graph: ir.Graph, attention: ir.Node) -> None:
    """One product, one transpose, and one rotation for queries and keys, where they are alike."""
    updates = [producer(attention.inputs[at], "TensorScatter") for at in (1, 2)]
    if updates[0] is None or updates[1] is None:
        return
    found = [_Heads.of(value) for value in (attention.inputs[0], updates[0].inputs[1], updates[1].inputs[1])]
    query, key, value = found
    if query is None or key is None or value is None:
        return
    parts = (query, key, value)
    if any(each.product.inputs[0] is not query.product.inputs[0] for each in parts):
        return
    if any(each.reshape.inputs[1] is not query.reshape.inputs[1] for each in parts):  # so all heads are alike
        return
    if len({each.bias is None for each in parts}) > 1:
        return
    cache = updates[0].inputs[0]
    head_dim = None if cache is None or cache.shape is None else cache.shape[3]
    if not isinstance(head_dim, int):
        return
    heads = [_columns(each.product) // head_dim for each in parts]
    name = f"{query.product.outputs[0].name}.joined"
    product = _joined_product(graph, [each.product for each in parts], name)
    nodes = [product]
    if query.bias is not None:
        nodes.append(_joined_addition(graph, product, [each.bias for each in parts], name))
    reshape = _node("Reshape", [nodes[-1].outputs[0], query.reshape.inputs[1]], query.reshape, f"{name}.heads")
    transpose = _node("Transpose", [reshape.outputs[0]], query.transpose, f"{name}.transposed")
    nodes += [reshape, transpose]
    if query.rotates_like(key) and value.rotary is None:
        assert query.rotary is not None
        assert key.rotary is not None
        split = _split(graph, transpose.outputs[0], [heads[0] + heads[1], heads[2]], axis=1)
        rotary = _node("RotaryEmbedding", [split.outputs[0], *query.rotary.inputs[1:]], query.rotary, f"{name}.rotated")
        rotary.attributes["num_heads"] = ir.AttrInt64("num_heads", heads[0] + heads[1])
        rotated = _split(graph, rotary.outputs[0], heads[:2], axis=1)
        nodes += [split, rotary, rotated]
        replaced = {
            query.rotary.outputs[0]: rotated.outputs[0],
            key.rotary.outputs[0]: rotated.outputs[1],
            value.transpose.outputs[0]: split.outputs[1],
        }
    else:
        split = _split(graph, transpose.outputs[0], heads, axis=1)
        nodes.append(split)
        replaced = {each.transpose.outputs[0]: part for each, part in zip(parts, split.outputs, strict=True)}
    graph.insert_before(query.product, nodes)
    for old, new in replaced.items():
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new)


def _join(graph: ir.Graph, products: Sequence[ir.Node]) -> None:
    product = _joined_product(graph, products, f"{products[0].outputs[0].name}.joined")
    split = _split(graph, product.outputs[0], [_columns(each) for each in products], axis=-1)
    graph.insert_before(products[0], [product, split])
    for each, part in zip(products, split.outputs, strict=True):
        part.type, part.shape = each.outputs[0].type, each.outputs[0].shape
        ir.convenience.replace_all_uses_with(each.outputs[0], part)


def _is_product(node: ir.Node) -> bool:
    """Whether `node` multiplies by weights of its own."""
    if node.op_type != "MatMul":
        return False
    weights, output = node.inputs[1], node.outputs[0]
    if weights is None or weights.const_value is None or output.is_graph_output():
        return False
    return weights.is_initializer() and len(weights.uses()) == 1 and len(weights.const_value.shape) == 2


def _columns(product: ir.Node) -> int:
    return int(_weights(product).shape[1])


def _weights(product: ir.Node) -> Any:
    assert product.inputs[1] is not None
    return product.inputs[1].const_value


def _joined_product(graph: ir.Graph, products: Sequence[ir.Node], name: str) -> ir.Node:
    tensors = [_weights(each) for each in products]
    rows, columns = int(tensors[0].shape[0]), sum(int(each.shape[1]) for each in tensors)

    def concatenated() -> ir.TensorProtocol:
        return ir.Tensor(np.concatenate([each.numpy() for each in tensors], axis=1))

    weights = ir.LazyTensor(
        concatenated, dtype=tensors[0].dtype, shape=ir.Shape([rows, columns]), name=f"{name}.weights"
    )
    joined = _node("MatMul", [products[0].inputs[0], constant(graph, weights)], products[0], name)
    joined.name = _joined_name([str(each.name) for each in products])
    joined.outputs[0].type = products[0].outputs[0].type
    return joined


def _value_and_bias(addition: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """The two inputs of an addition of a constant row; nothing if it is another addition."""
    for value, bias in (tuple(addition.inputs), tuple(reversed(addition.inputs))):
        if bias is not None and bias.is_initializer() and bias.const_value is not None:
            return (value, bias) if len(bias.const_value.shape) == 1 else (None, None)
    return None, None


def _joined_addition(graph: ir.Graph, product: ir.Node, biases: Sequence[ir.Value | None], name: str) -> ir.Node:
    rows = [each.const_value.numpy() for each in biases if each is not None and each.const_value is not None]
    bias = constant(graph, ir.tensor(np.concatenate(rows), name=f"{name}.bias"))
    node = ir.node("Add", [product.outputs[0], bias], name=f"{name}.biased")
    node.outputs[0].name, node.outputs[0].type = f"{name}.biased", product.outputs[0].type
    return node


def _joined_name(names: Sequence[str]) -> str:
    """Such as model.layers.0.mlp.gate_proj+up_proj/MatMul."""
    modules = [name.rpartition("/")[0] for name in names]
    leaves = "+".join(module.rpartition(".")[2] for module in modules)
    return f"{modules[0].rpartition('.')[0]}.{leaves}/MatMul"


def _split(graph: ir.Graph, value: ir.Value, sizes: Sequence[int], axis: int) -> ir.Node:
    name = f"{value.name}.sizes"
    columns = constant(graph, ir.tensor(np.array(sizes, np.int64), name=name))
    node = ir.node(
        "Split", [value, columns], attributes={"axis": axis}, num_outputs=len(sizes), name=f"{value.name}.split"
    )
    for index, output in enumerate(node.outputs):
        output.name = f"{value.name}.{index}"
    return node


def constant(graph: ir.Graph, tensor: Any) -> ir.Value:
    """`tensor`, which has a name, as a constant of `graph`."""
    value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _node(operator: str, inputs: Sequence[ir.Value | None], like: ir.Node, name: str) -> ir.Node:
    """A node with the attributes of `like`; `name`: of its output."""
    node = ir.node(operator, inputs, attributes=dict(like.attributes), name=name)
    node.outputs[0].name = name
    return node
