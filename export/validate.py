"""Compare an exported graph with the PyTorch model it came from. Part of every export.

One error class per check, so that a failure says by its name what is wrong.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch

from specrun.engines.errors import SpecrunError, first_line
from specrun.engines.signature import (
    BATCH,
    CACHE_LENGTH,
    CAPACITY,
    HIDDEN_STATES,
    INPUT_IDS,
    OPSET,
    POSITION_IDS,
    TOKENS,
    TREE_MASK,
    Shape,
    Signature,
    past,
)
from specrun.export.contract import recorded_states
from specrun.export.taps import add_taps

# Largest difference of a logit, as a share of the largest logit. Measured: 4e-6 (fp32, SmolLM2-135M),
# 2.4e-3 (fp16, the worst of the tiny models), 4.6e-3 (fp16, SmolLM2-135M).
TOLERANCE = {"float32": 1e-4, "float16": 3e-2}
ONNX_TYPES = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}
CONTROL_TYPES = {
    INPUT_IDS: onnx.TensorProto.INT64,
    POSITION_IDS: onnx.TensorProto.INT64,
    CACHE_LENGTH: onnx.TensorProto.INT64,
    TREE_MASK: onnx.TensorProto.BOOL,
}
MIN_COSINE = 0.999
ERROR = 3

Array = np.ndarray[Any, Any]


class ValidationError(SpecrunError):
    """An exported graph is not what it must be. A defect of the export, or a model it cannot express."""


class GraphNamesError(ValidationError):
    """Inputs or outputs are missing, superfluous or in another order."""


class GraphShapesError(ValidationError):
    """An input or output has another type or shape than the signature says."""


class GraphOperatorsError(ValidationError):
    """An operator is not a standard one, or the ONNX checker refuses the graph."""


class ChunkValuesError(ValidationError):
    """Logits differ from PyTorch's for chunks written at several cache offsets, with rollbacks between."""


class RaggedBatchValuesError(ValidationError):
    """The same for the second row of a batch whose rows have different lengths."""


class TreeValuesError(ValidationError):
    """Logits of a tree's nodes differ from PyTorch's for the path that leads to each node."""


class StateValuesError(ValidationError):
    """A hidden state in the graph is not the one that PyTorch has at that place."""


@dataclass(frozen=True)
class Trial:
    """Sizes of the calls that a validation makes."""

    batch: int
    capacity: int
    widths: tuple[int, ...]
    tree_nodes: int
    first_nodes: int

    @classmethod
    def of(cls, pinned: dict[str, int], max_context: int) -> "Trial":
        if pinned:
            return cls(pinned[BATCH], pinned[CAPACITY], (pinned[TOKENS],) * 3, pinned[TOKENS], pinned[TOKENS])
        return cls(batch=2, capacity=min(32, max_context), widths=(7, 5, 1, 4), tree_nodes=7, first_nodes=3)

    def tree_calls(self) -> list[slice]:
        """The calls in which the tree is fed: where the widths are free, two, as a draft grows it."""
        parts = [slice(0, self.first_nodes), slice(self.first_nodes, self.tree_nodes)]
        return [part for part in parts if part.start < part.stop]


def validate_graph(path: Path, signature: Signature, pinned: dict[str, int], dtype: str) -> None:
    """Check names, types, shapes and operators of the file at `path`. Raises a ValidationError."""
    graph = onnx.load(path, load_external_data=False)
    _check_names("inputs", [value.name for value in graph.graph.input], list(signature.inputs()))
    _check_names("outputs", [value.name for value in graph.graph.output], list(signature.outputs()))
    declared = {**signature.inputs(), **signature.outputs()}
    for value in [*graph.graph.input, *graph.graph.output]:
        _check_shape(value, declared[value.name], pinned, CONTROL_TYPES.get(value.name, ONNX_TYPES[dtype]))
    require_standard(path)


def require_standard(path: Path) -> None:
    """Check that a file holds only standard operators of the contract's opset. Raises GraphOperatorsError."""
    graph = onnx.load(path, load_external_data=False)
    foreign = sorted(
        {f"{node.domain}::{node.op_type}" for node in graph.graph.node if node.domain not in ("", "ai.onnx")}
    )
    if foreign or graph.functions:
        raise GraphOperatorsError(f"{path} has operators outside the default domain: {foreign or 'local functions'}")
    versions = {entry.domain: entry.version for entry in graph.opset_import}
    if versions.get("") != OPSET:
        raise GraphOperatorsError(f"{path}: got opset {versions.get('')}, expected {OPSET}")
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # checker, shape inference and protobuf errors
        raise GraphOperatorsError(f"onnx.checker refuses {path}: {first_line(error)}") from error


def validate_values(path: Path, model: Any, signature: Signature, trial: Trial) -> float:
    """Run the graph on ONNX Runtime against `model`. Returns the largest relative difference found.

    Raises ChunkValuesError, RaggedBatchValuesError or TreeValuesError.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return _Comparison(path, model, signature, trial).run()
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def validate_states(path: Path, model: Any, signature: Signature) -> None:
    """Check the hidden states inside the graph, from which taps and early exits are made. Raises StateValuesError."""
    tapped = path.with_name("states.onnx")
    graph = ir.load(path)
    everything = replace(signature, taps=tuple(range(signature.num_layers + 1)))
    add_taps(graph, everything)
    ir.save(graph, tapped)  # on the same weights
    del graph
    try:
        ids = np.random.default_rng(2).integers(0, signature.vocab_size, (1, 7))
        shape = (1, signature.kv_heads, 8, signature.head_dim)
        dtype = str(model.dtype).removeprefix("torch.")
        feeds = {
            INPUT_IDS: ids,
            POSITION_IDS: np.arange(7)[None],
            CACHE_LENGTH: np.zeros(1, np.int64),
            TREE_MASK: np.tri(7, dtype=bool)[None],
            **{past(*part): np.zeros(shape, dtype) for part in signature.cache_parts()},
        }
        (got,) = open_session(tapped).run([HIDDEN_STATES], feeds)
    finally:
        tapped.unlink()
    with recorded_states(model) as states:
        model(input_ids=torch.from_numpy(ids), use_cache=False)
    wanted = [*states[:-2], states[-1]]  # the tap after the last layer is what the head reads
    for index, (rows, reference) in enumerate(zip(np.split(got[0], len(wanted), 1), wanted, strict=True)):
        a, b = rows.astype(np.float64).ravel(), reference[0].double().numpy().ravel()
        cosine = float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        if not cosine > MIN_COSINE:
            raise StateValuesError(f"state {index}: its cosine with PyTorch's is {cosine:.4f}, so it is another state")


def open_session(path: Path) -> ort.InferenceSession:
    """A session for comparisons."""
    options = ort.SessionOptions()
    options.log_severity_level = ERROR  # unbound caches are copied here, with a warning for each
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class _Comparison:
    def __init__(self, path: Path, model: Any, signature: Signature, trial: Trial) -> None:
        self.session = open_session(path)
        self.model, self.signature, self.trial = model, signature, trial
        self.dtype = str(model.dtype).removeprefix("torch.")
        length = min(trial.capacity, sum(trial.widths) + trial.tree_nodes)
        rng = np.random.default_rng(0)
        self.ids = rng.integers(0, signature.vocab_size, (trial.batch, length), dtype=np.int64)
        shape = (trial.batch, signature.kv_heads, trial.capacity, signature.head_dim)
        self.caches = {past(*part): np.zeros(shape, self.dtype) for part in signature.cache_parts()}
        self.lengths = np.zeros(trial.batch, np.int64)
        self.worst = 0.0

    def run(self) -> float:
        wanted = np.stack([self._reference(row) for row in self.ids])
        for step, width in enumerate(self.trial.widths):
            self._make_room(width)
            tokens = np.stack([self.ids[row, at : at + width] for row, at in enumerate(self.lengths)])
            got = self._call(tokens, np.arange(width), np.tri(width, dtype=bool))
            for row, at in enumerate(self.lengths):
                error = RaggedBatchValuesError if row else ChunkValuesError
                self._compare(got[row], wanted[row, at : at + width], error, f"{width} tokens at offset {at}")
            # Some rows are rejected, differently in each row of the batch: the next call overwrites them.
            self.lengths += [max(1, width - (step + row) % 3) for row in range(self.trial.batch)]
        self._tree()
        return self.worst

    def _make_room(self, rows: int) -> None:
        """A static file may be as wide as its capacity: go back far enough."""
        self.lengths = np.minimum(self.lengths, self.trial.capacity - rows)

    def _tree(self) -> None:
        """A binary tree below the committed tokens; each node against the chain that leads to it."""
        nodes = self.trial.tree_nodes
        self._make_room(nodes)
        paths = list(_tree_paths(nodes))
        mask = np.zeros((nodes, nodes), bool)
        for node, path in enumerate(paths):
            mask[node, path] = True
        depths = np.array([len(path) - 1 for path in paths])
        tokens = np.random.default_rng(1).integers(0, self.signature.vocab_size, (self.trial.batch, nodes))
        start = self.lengths.copy()
        rows = []
        for part in self.trial.tree_calls():
            self.lengths = start + part.start
            rows.append(self._call(tokens[:, part], depths[part] - part.start, mask[part, : part.stop]))
        got = np.concatenate(rows, 1)
        for row in range(self.trial.batch):
            prefix = self.ids[row, : start[row]]
            for node, path in enumerate(paths):
                wanted = self._reference(np.concatenate([prefix, tokens[row, path]]))[-1]
                self._compare(got[row, node], wanted, TreeValuesError, f"node {node} of batch row {row}")

    def _call(self, tokens: Array, depths: Array, mask: Array) -> Array:
        """`depths`: position of each token minus the number of rows before this call."""
        batch = self.trial.batch
        feeds = {
            INPUT_IDS: tokens,
            POSITION_IDS: self.lengths[:, None] + depths[None, :],
            CACHE_LENGTH: self.lengths,
            TREE_MASK: np.repeat(mask[None], batch, 0),
        }
        logits, *caches = self.session.run(None, {**feeds, **self.caches})
        self.caches = dict(zip(self.caches, caches, strict=True))
        return np.asarray(logits, np.float32)

    def _reference(self, tokens: Array) -> Array:
        logits = self.model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits
        return np.asarray(logits[0].float().numpy())

    def _compare(self, got: Array, wanted: Array, error: type[ValidationError], where: str) -> None:
        difference = float(np.abs(got - wanted).max() / np.abs(wanted).max())
        if not difference <= TOLERANCE[self.dtype]:  # so written, NaN fails too
            raise error(
                f"{where}: logits differ from PyTorch by {difference:.1e} of the largest, "
                f"at most {TOLERANCE[self.dtype]:.0e} is rounding; this model cannot be exported exactly"
            )
        self.worst = max(self.worst, difference)


def _tree_paths(nodes: int) -> Iterator[list[int]]:
    """For each node of a binary tree in breadth-first order, the nodes from the root to it."""
    paths: list[list[int]] = []
    for node in range(nodes):
        paths.append([*paths[(node - 1) // 2], node] if node else [0])
        yield paths[node]


def _check_names(what: str, got: list[str], wanted: list[str]) -> None:
    if got != wanted:
        missing, extra = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
        raise GraphNamesError(f"{what}: missing {missing}, superfluous {extra}, or in another order than the contract")


def _check_shape(value: onnx.ValueInfoProto, wanted: Shape, pinned: dict[str, int], wanted_type: int) -> None:
    tensor = value.type.tensor_type
    got = tuple(axis.dim_param or axis.dim_value for axis in tensor.shape.dim)
    expected = tuple(pinned.get(axis, axis) if isinstance(axis, str) else axis for axis in wanted)
    if got != expected or tensor.elem_type != wanted_type:
        names = onnx.TensorProto.DataType
        raise GraphShapesError(
            f"{value.name}: got {names.Name(tensor.elem_type)} {got}, expected {names.Name(wanted_type)} {expected}"
        )
