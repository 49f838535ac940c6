"""The engine for calls of one sequence: attention as the one operator that ONNX Runtime has for all of it.

GroupQueryAttention takes query, key and value as one product gives them, rotates them, writes the KV cache and attends,
in time that follows the committed length; the ten operators that it replaces go through all rows of the cache. It takes
several tokens of one sequence only, so a bundle holds both engines, on the same weights.

A single token it rounds otherwise than several, by a millionth, which is enough to make a quantized activation fall on
the next level. Where that matters it gets a second row, of zeros, which nothing sees. All other operators give a row
the same bits, however many others there are, and go on with one.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specrun.engines.backend import LEAST_ROWS
from specrun.engines.cpu_fusion import CONTRIB
from specrun.engines.joined_products import constant, producer
from specrun.engines.signature import CACHE_LENGTH, INPUT_IDS


def use_group_query_attention(graph: Path, never_one_row: bool) -> bool:
    """Rewrite `graph`, with joined products, in place; its weights stay where they are. Returns whether it could be
    done: an attention of another kind leaves the graph as it was.

    `never_one_row`: single tokens are to have the same bits as several. The KV cache needs a row beside theirs for it.
    """
    model = ir.load(graph)
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    found = [_JoinedAttention.of(node) for node in attentions]
    parts = [each for each in found if each is not None]
    if not parts or len(parts) < len(found) or len({part.mask for part in parts}) > 1:
        if found:
            logger.info("%s: attention of this kind stays several operators", graph.parent.name)
        return False
    shared = _Shared(model.graph, parts[0].mask, never_one_row)
    for part in parts:
        _replace(model.graph, part, shared)
    model.opset_imports[CONTRIB] = 1
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    ir.save(model, graph)
    return True


logger = logging.getLogger(__name__)

COLUMNS = 16  # the operator wants heads with a multiple of it


@dataclass(frozen=True)
class _JoinedAttention:
    """Attention whose queries, keys and values come from one product [batch, tokens, (heads + 2 kv_heads) * dim]."""

    node: ir.Node
    joined: ir.Value
    heads: int
    kv_heads: int
    cos: ir.Value | None  # [batch, tokens, dim / 2]; None: nothing is rotated
    sin: ir.Value | None
    mask: ir.Value  # bool [batch, 1, tokens, capacity]
    updates: tuple[ir.Node, ir.Node]  # of the KV cache
    output: ir.Value  # [batch, tokens, heads * dim]

    @classmethod
    def of(cls, node: ir.Node) -> "_JoinedAttention | None":
        keys, values = (producer(node.inputs[at], "TensorScatter") for at in (1, 2))
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        output = _flattened(node.outputs[0])
        if keys is None or values is None or output is None or mask is None or mask.dtype != ir.DataType.BOOL:
            return None
        cos = sin = None
        split = producer(node.inputs[0], "Split")
        rotary = None if split is None else producer(split.inputs[0], "RotaryEmbedding")
        if rotary is not None:
            if any(_number(rotary, name) for name in ("interleaved", "rotary_embedding_dim")):
                return None
            cos, sin = rotary.inputs[1], rotary.inputs[2]
            split = producer(rotary.inputs[0], "Split")
        transpose = None if split is None else producer(split.inputs[0], "Transpose")
        reshape = None if transpose is None else producer(transpose.inputs[0], "Reshape")
        if reshape is None or reshape.inputs[0] is None or reshape.inputs[0].dtype != ir.DataType.FLOAT:
            return None
        queries, cache = node.inputs[0], node.inputs[1]
        assert queries is not None
        assert cache is not None
        if queries.shape is None or cache.shape is None:
            return None
        heads, kv_heads, dim = queries.shape[1], cache.shape[1], cache.shape[3]
        if not (isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(dim, int)) or dim % COLUMNS:
            return None
        return cls(node, reshape.inputs[0], heads, kv_heads, cos, sin, mask, (keys, values), output)


def _flattened(value: ir.Value) -> ir.Value | None:
    """`value` [batch, heads, tokens, dim] after it was transposed and reshaped to [batch, tokens, heads * dim]."""
    for operator in ("Transpose", "Reshape"):
        readers = [use.node for use in value.uses()]
        if len(readers) != 1 or readers[0].op_type != operator:
            return None
        value = readers[0].outputs[0]
    return value


def _number(node: ir.Node, name: str) -> Any:
    return node.attributes[name].value if name in node.attributes else 0


class _Shared:
    """What all layers read: lengths, and the mask as numbers to add."""

    def __init__(self, graph: ir.Graph, mask: ir.Value, never_one_row: bool) -> None:
        inputs = {value.name: value for value in graph.inputs}
        self._graph = graph
        self._length = inputs[CACHE_LENGTH]
        self._count = 0
        self._tokens = self.node("Shape", [inputs[INPUT_IDS]], start=1, end=2)
        self._zero = self.constant(np.array([0], np.int64))
        self._one = self.constant(np.array([1], np.int64))
        rows, self._added = self._tokens, None
        if never_one_row:
            rows = self.node("Max", [self._tokens, self.constant(np.array([LEAST_ROWS], np.int64))])
            self._added = self.node("Sub", [rows, self._tokens])
            self._row_pads = self._pads(rank=3, axis=1, count=self._added)
        in_all = self.node("Add", [self._length, rows])
        self.total = self.node("Cast", [in_all], to=int(ir.DataType.INT32))
        self.last = self.node("Sub", [self.total, self.constant(np.array([1], np.int32))])
        seen = self.node("Slice", [mask, self._zero, in_all, self.constant(np.array([3], np.int64))])
        visible, hidden = (self.constant(np.array(value, np.float32)) for value in (0, -np.inf))
        self.bias = self.node("Where", [seen, visible, hidden])
        if self._added is not None:
            self.bias = self.node("Pad", [self.bias, self._pads(rank=4, axis=2, count=self._added)])
        count = self.node("Squeeze", [rows])
        numbers = self.node("Range", [self.constant(np.array(0)), count, self.constant(np.array(1))])
        self.positions = self.node("Unsqueeze", [numbers, self._zero])
        self._tables: dict[ir.Value, ir.Value] = {}

    def table(self, angles: ir.Value | None) -> ir.Value | None:
        """`angles` of the tokens of this call, as the table that the operator looks them up in by `positions`. It wants
        a row for each token of the sequence; those behind are never looked up."""
        if angles is None:
            return None
        if angles not in self._tables:
            rows = self.node("Squeeze", [angles, self._zero])
            missing = self._length if self._added is None else self.node("Add", [self._length, self._added])
            self._tables[angles] = self.node("Pad", [rows, self._pads(rank=2, axis=0, count=missing)])
        return self._tables[angles]

    def rows(self, joined: ir.Value) -> ir.Value:
        """`joined` [1, tokens, columns] with the rows that attention takes."""
        return joined if self._added is None else self.node("Pad", [joined, self._row_pads])

    def tokens(self, attended: ir.Value) -> ir.Value:
        """Those rows of `attended` [1, rows, columns] that are tokens."""
        return attended if self._added is None else self.node("Slice", [attended, self._zero, self._tokens, self._one])

    def _pads(self, rank: int, axis: int, count: ir.Value) -> ir.Value:
        """What Pad wants, for `count` [1] more at the end of `axis`."""
        before, behind = rank + axis, rank - axis - 1
        zeros = [self.constant(np.zeros(length, np.int64)) for length in (before, behind)]
        return self.node("Concat", [zeros[0], count, zeros[1]], axis=0)

    def constant(self, values: Any) -> ir.Value:
        self._count += 1
        tensor = ir.tensor(values, name=f"one_sequence.constant.{self._count}")
        return constant(self._graph, tensor)

    def node(self, operator: str, inputs: list[ir.Value | None], **attributes: Any) -> ir.Value:
        self._count += 1
        node = ir.node(operator, inputs, attributes=attributes, name=f"one_sequence/{operator}_{self._count}")
        node.outputs[0].name = f"one_sequence.{operator}.{self._count}"
        self._graph.append(node)
        return node.outputs[0]


def _replace(graph: ir.Graph, part: _JoinedAttention, shared: _Shared) -> None:
    caches = [update.inputs[0] for update in part.updates]
    lengths = [shared.last, shared.total]
    tables = [shared.table(part.cos), shared.table(part.sin)]
    attributes: dict[str, Any] = {"num_heads": part.heads, "kv_num_heads": part.kv_heads}
    attributes["do_rotary"] = int(part.cos is not None)
    for name in ("scale", "softcap"):
        if value := _number(part.node, name):
            attributes[name] = value
    positions = None if part.cos is None else shared.positions
    node = ir.node(
        "GroupQueryAttention",
        [shared.rows(part.joined), None, None, *caches, *lengths, *tables, positions, shared.bias],
        attributes=attributes,
        domain=CONTRIB,
        num_outputs=3,
        name=part.node.name,
    )
    graph.append(node)
    replaced = (part.output, *(update.outputs[0] for update in part.updates))
    for old, new in zip(replaced, (shared.tokens(node.outputs[0]), *node.outputs[1:]), strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        old.name = f"{old.name}.replaced"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
