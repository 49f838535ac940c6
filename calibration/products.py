"""The matrix products of a graph: what quantization works on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Product:
    """A MatMul of an activation [..., channels] with constant weights [channels, columns]."""

    node: onnx.NodeProto
    activation: str
    weights: str

    @property
    def layer(self) -> str:
        """Where the model has it, such as model.layers.0.mlp.down_proj: exports name nodes after their modules."""
        return self.node.name.rpartition("/")[0] or self.node.name


@dataclass(frozen=True)
class Activation:
    """One product input over the calibration text."""

    maxima: Array  # largest magnitude of each channel, float32 [channels]
    rows: Array  # a sample, float32 [rows, channels]


class Graph:
    """A model in memory, with its weights by name."""

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        self._initializers = {each.name: each for each in self.model.graph.initializer}
        self._folded: dict[str, onnx.NodeProto] = {}  # weights that are others transposed, until they are changed
        self._fold_transposes()

    def weights(self, name: str) -> Array:
        return np.asarray(numpy_helper.to_array(self._initializers[name]))

    def set_weights(self, name: str, values: Array) -> None:
        """Replace weights, or add some."""
        self._folded.pop(name, None)
        tensor = numpy_helper.from_array(np.ascontiguousarray(values), name)
        if name in self._initializers:
            self._initializers[name].CopyFrom(tensor)
        else:
            self._initializers[name] = self.model.graph.initializer.add()
            self._initializers[name].CopyFrom(tensor)

    def has_weights(self, name: str) -> bool:
        return name in self._initializers

    def products(self) -> list[Product]:
        return [
            Product(node, node.input[0], node.input[1])
            for node in self.model.graph.node
            if node.op_type == "MatMul" and self.has_weights(node.input[1])
        ]

    def producer(self, name: str) -> onnx.NodeProto | None:
        return next((node for node in self.model.graph.node if name in node.output), None)

    def consumers(self, name: str) -> int:
        """How often a tensor is read, the graph's outputs included."""
        reads: int = sum(list(node.input).count(name) for node in self.model.graph.node)
        return reads + len([output for output in self.model.graph.output if output.name == name])

    def drop_unused_weights(self) -> None:
        used = {name for node in self.model.graph.node for name in node.input}
        for name in [name for name in self._initializers if name not in used]:
            self.model.graph.initializer.remove(self._initializers.pop(name))

    def save(self, path: Path) -> None:
        """Write the graph, its weights beside it in one file with `.data` at the end of its name."""
        self._restore_transposes()
        data = f"{path.name}.data"
        onnx.save_model(self.model, path, save_as_external_data=True, location=data)

    def _fold_transposes(self) -> None:
        """A tied head is the transposed embedding; as constant weights it is a product like the others."""
        transposed = {
            node.output[0]: node
            for node in self.model.graph.node
            if node.op_type == "Transpose" and self.has_weights(node.input[0])
        }
        for node in self.model.graph.node:
            if node.op_type != "MatMul" or node.input[1] not in transposed:
                continue
            source = transposed[node.input[1]]
            name = f"{node.input[1]}.folded"
            permutation = next((list(each.ints) for each in source.attribute if each.name == "perm"), None)
            self.set_weights(name, self.weights(source.input[0]).transpose(permutation))
            self._folded[name] = source
            node.input[1] = name
        for output, node in transposed.items():
            if not self.consumers(output):
                self.model.graph.node.remove(node)

    def _restore_transposes(self) -> None:
        """A tied head that was not quantized goes on sharing the embedding's weights."""
        for name, source in self._folded.items():
            readers = [node for node in self.model.graph.node if name in node.input]
            if not readers:
                continue
            for node in readers:
                node.input[1] = source.output[0]
            self.model.graph.initializer.remove(self._initializers.pop(name))
            if self.producer(source.output[0]) is None:
                self.model.graph.node.insert(0, source)
        self._folded.clear()
