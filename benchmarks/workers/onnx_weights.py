"""How many bytes of weights a call of an ONNX graph reads."""

from math import prod
from pathlib import Path

import onnx

LOOKUPS = ("Gather", "GatherBlockQuantized")


def bytes_read(file: Path) -> int:
    """All weights, apart from tables of which nodes only look up rows, such as an embedding."""
    graph = onnx.load(file, load_external_data=False).graph
    tables = {node.input[0] for node in graph.node if node.op_type in LOOKUPS}
    read = {name for node in graph.node for name in node.input if node.op_type not in LOOKUPS}
    return sum(_bytes(each) for each in graph.initializer if each.name in read or each.name not in tables)


def _bytes(tensor: onnx.TensorProto) -> int:
    return int(prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
