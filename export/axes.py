"""The named axes of a graph: give them their names after tracing, pin them to numbers on request."""

import onnx_ir as ir
from onnxscript import optimizer

from specrun.engines.signature import Shape, Signature


def name_axes(model: ir.Model, signature: Signature) -> None:
    """Replace the tracer's symbols (s27, s43, ...) by batch, tokens, tree and capacity, everywhere."""
    declared = signature.inputs()
    names = {}
    for value in model.graph.inputs:
        for symbol, name in zip(_shape(value), declared[str(value.name)], strict=True):
            if isinstance(name, str):
                names[str(symbol)] = name
    _rename(model, names)
    for value in model.graph.outputs:  # some output shapes are lost by symbolic operators
        value.shape = ir.Shape(signature.outputs()[str(value.name)])


def pin_axes(model: ir.Model, sizes: dict[str, int]) -> None:
    """Make named axes static, for example {"batch": 1, "tokens": 5, "capacity": 512}, and fold what follows."""
    _rename(model, sizes)
    optimizer.optimize(model)


def _rename(model: ir.Model, names: dict[str, str] | dict[str, int]) -> None:
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape([names.get(str(axis), axis) for axis in _shape(value)])


def _values(model: ir.Model) -> list[ir.Value]:
    produced = [output for node in model.graph.all_nodes() for output in node.outputs]
    return [*model.graph.inputs, *produced]


def _shape(value: ir.Value) -> Shape:
    if value.shape is None:
        raise AssertionError(f"{value.name} has no shape")
    return tuple(axis if isinstance(axis, int) else str(axis.value) for axis in value.shape)
