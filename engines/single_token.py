"""A single token's attention in products of several rows, as attention of several tokens is.

ONNX Runtime attends head by head, so the query of a single token is a product of one row, which it rounds otherwise
than products of several: plain decoding would differ from verification by that. Every other operator gives a row the
same bits, however many others there are. The query heads that share a key head lie one behind the other: for a single
token a reshape makes them rows of one product. (For several tokens that would be slower, it leaves fewer products to
share among threads.) Where no heads share a key, a copy of the row is put beside it.
"""

from pathlib import Path

import numpy as np
import onnx_ir as ir

from specrun.engines.joined_products import constant
from specrun.engines.signature import INPUT_IDS

TOKENS = 2  # axis of queries and their outputs [batch, heads, tokens, dim], and of masks [batch, 1, tokens, capacity]


def attend_in_several_rows(graph: Path, rewritten: Path) -> None:
    """Write `graph` to `rewritten`, in the same directory, with every attention changed; its weights stay where they
    are."""
    model = ir.load(graph)
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    if attentions:
        rewriting = _Rewriting(model.graph)
        for attention in attentions:
            rewriting.rewrite(attention)
        model.graph.sort()
    ir.save(model, rewritten)


class _Rewriting:
    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._masks: dict[tuple[ir.Value, int], ir.Value] = {}
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self._choices: dict[tuple[tuple[int, ...], tuple[int, ...]], ir.Value] = {}
        ids = next(value for value in graph.inputs if value.name == INPUT_IDS)
        self._tokens = self._node("Shape", [ids], "call/tokens", start=1, end=2)  # [1]
        self._single = self._node("Equal", [self._tokens, self._numbers(1)], "call/single_token")  # [1]
        self._copies = self._node("Cast", [self._single], "call/copies", to=int(ir.DataType.INT64))  # [1]

    def rewrite(self, attention: ir.Node) -> None:
        query, key, _, mask = attention.inputs[:4]
        assert query is not None
        assert key is not None
        assert mask is not None
        heads, kv_heads, head_dim = (_size(value, axis) for value, axis in ((query, 1), (key, 1), (query, 3)))
        group = heads // kv_heads
        if (mask, group) not in self._masks:
            self._masks[mask, group] = self._of_several_rows(mask, group)
        output = attention.outputs[0]
        readers = list(output.uses())
        if group > 1:
            shape = self._if_single((0, kv_heads, group, head_dim), (0, heads, -1, head_dim))
            rows = self._node("Reshape", [query, shape], f"{query.name}/rows")
            restored = self._node("Reshape", [output, self._numbers(0, heads, -1, head_dim)], f"{output.name}/heads")
        else:
            rows = self._with_copy(query)
            restored = self._first(output, self._tokens, f"{output.name}/tokens")
        attention.replace_input_with(0, rows)
        attention.replace_input_with(3, self._masks[mask, group])
        restored.type, restored.shape, output.shape = output.type, output.shape, None
        for reader, index in readers:
            reader.replace_input_with(index, restored)

    def _of_several_rows(self, mask: ir.Value, group: int) -> ir.Value:
        if group == 1:
            return self._with_copy(mask)
        repeats = self._if_single((1, 1, group, 1), (1, 1, 1, 1))
        return self._node("Tile", [mask, repeats], f"{mask.name}/{group}_rows")

    def _with_copy(self, value: ir.Value) -> ir.Value:
        """A single token twice, several as they are."""
        copy = self._first(value, self._copies, f"{value.name}/copy")
        return self._node("Concat", [value, copy], f"{value.name}/with_copy", axis=TOKENS)

    def _first(self, value: ir.Value, count: ir.Value, name: str) -> ir.Value:
        return self._node("Slice", [value, self._numbers(0), count, self._numbers(TOKENS)], name)

    def _if_single(self, single: tuple[int, ...], several: tuple[int, ...]) -> ir.Value:
        if (single, several) not in self._choices:
            inputs: list[ir.Value | None] = [self._single, self._numbers(*single), self._numbers(*several)]
            self._choices[single, several] = self._node("Where", inputs, f"call/choice_{len(self._choices)}")
        return self._choices[single, several]

    def _numbers(self, *numbers: int) -> ir.Value:
        if numbers not in self._constants:
            tensor = ir.tensor(np.array(numbers, np.int64), name=f"call/{'_'.join(map(str, numbers))}")
            self._constants[numbers] = constant(self._graph, tensor)
        return self._constants[numbers]

    def _node(self, operator: str, inputs: list[ir.Value | None], name: str, **attributes: int) -> ir.Value:
        node = ir.node(operator, inputs, attributes=attributes, name=name)
        node.outputs[0].name = name
        self._graph.append(node)
        return node.outputs[0]


def _size(value: ir.Value, axis: int) -> int:
    size = None if value.shape is None else value.shape[axis]
    assert isinstance(size, int)  # heads and their width are fixed
    return size
