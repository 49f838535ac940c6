"""Products in 8 bits: QuantizeLinear and DequantizeLinear around them, after a plan."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from specrun.calibration.plan import Plan, quantize_columns
from specrun.calibration.products import Graph, Product


@dataclass(frozen=True)
class Encoding:
    """How an activation's levels, -127 to 127, are written. Both mean the same numbers."""

    dtype: type[np.generic]
    zero_point: int


# ONNX Runtime's CPU kernels fuse unsigned activations only; TensorRT wants a symmetric scale.
UNSIGNED, SIGNED = Encoding(np.uint8, 128), Encoding(np.int8, 0)


def quantize_products(graph: Graph, plan: Plan, encoding: Encoding) -> None:
    """Quantize the products of `graph` that `plan` says can be; a graph that has only some of them is fine. The others
    are smoothed and left as they are."""
    by_activation: dict[str, list[Product]] = {}
    for product in graph.products():
        if product.activation in plan:
            by_activation.setdefault(product.activation, []).append(product)
    for name, products in by_activation.items():
        _smooth(graph, name, products, plan)
        if plan[name].quantized:
            _quantize(graph, name, products, plan[name].scale, encoding)
    graph.drop_unused_weights()


def _smooth(graph: Graph, name: str, products: list[Product], plan: Plan) -> None:
    if not plan[name].strength:
        return
    factors = plan[name].factors
    producer = graph.producer(name)
    assert producer is not None
    for weight in producer.input[1:]:
        _scale(graph, weight, 1 / factors)
    for product in products:
        _scale(graph, product.weights, factors[:, None])


def _scale(graph: Graph, name: str, factors: Any) -> None:
    weights = graph.weights(name)
    graph.set_weights(name, (weights.astype(np.float32) * factors).astype(weights.dtype))


def _quantize(graph: Graph, name: str, products: list[Product], scale: float, encoding: Encoding) -> None:
    parameters = [f"{name}.scale", f"{name}.zero_point"]
    dtype = graph.weights(products[0].weights).dtype
    graph.set_weights(parameters[0], np.array(scale, dtype))
    graph.set_weights(parameters[1], np.array(encoding.zero_point, encoding.dtype))
    levels, rounded = f"{name}.levels", f"{name}.rounded"
    added = [
        helper.make_node("QuantizeLinear", [name, *parameters], [levels], name=levels),
        helper.make_node("DequantizeLinear", [levels, *parameters], [rounded], name=rounded),
    ]
    for product in products:
        weights = product.weights
        integers, scales = quantize_columns(graph.weights(weights), dtype)
        inputs = [f"{weights}.levels", f"{weights}.scales", f"{weights}.zero_points"]
        for tensor, values in zip(inputs, (integers, scales, np.zeros(len(scales), np.int8)), strict=True):
            graph.set_weights(tensor, values)
        output = f"{weights}.rounded"
        added.append(helper.make_node("DequantizeLinear", inputs, [output], name=output, axis=1))
        product.node.input[0], product.node.input[1] = rounded, output
    _insert_before(graph.model.graph, products[0].node, added)


def _insert_before(graph: Any, node: onnx.NodeProto, added: list[onnx.NodeProto]) -> None:
    at = next(index for index, each in enumerate(graph.node) if each is node or each.name == node.name)
    for offset, each in enumerate(added):
        graph.node.insert(at + offset, each)
