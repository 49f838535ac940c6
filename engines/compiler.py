"""From exported graphs to engines of one backend and precision."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx

from specrun.calibration.plan import Plan
from specrun.calibration.products import Graph
from specrun.calibration.w8a8 import SIGNED, UNSIGNED, quantize_products
from specrun.calibration.weights import quantize_weights
from specrun.engines import ort
from specrun.engines.backend import ORT, ORT_CUDA, one_sequence_file
from specrun.engines.cpu_fusion import fuse_for_cpu
from specrun.engines.joined_products import join_products
from specrun.engines.layers import EngineLayers, Layer
from specrun.engines.manifest import call_shapes
from specrun.engines.one_sequence import use_group_query_attention
from specrun.engines.precision import Precision
from specrun.engines.shared_weights import share_weights
from specrun.engines.single_token import attend_in_several_rows
from specrun.engines.tensorrt_build import build_engine

# Compiles a graph into an engine for ONNX Runtime.
Compile = Callable[[Path, Path], None]

PRECISION_NAMES = {
    onnx.TensorProto.FLOAT: "fp32",
    onnx.TensorProto.FLOAT16: "fp16",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.UINT8: "int8",
}


@dataclass(frozen=True)
class Compiler:
    """What a build does to every graph."""

    backend: str
    precision: Precision
    widths: tuple[int, ...]  # tokens per call that engines with static shapes are for, ascending
    slots: int  # sequences that they serve in one call
    gpus: tuple[str, ...]
    cache: Path  # directory of what the next build need not do again

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Batch and width of the calls that engines with static shapes are for."""
        return call_shapes(self.widths, self.slots, self.precision.quantized)

    def rows(self, capacity: int) -> int:
        """Rows of a KV cache that holds `capacity` tokens: calls that are wider than what is left of it need some."""
        return capacity + self.widths[-1]

    def compile(self, graph: Path, engine: Path, capacity: int, plan: Plan | None = None) -> None:
        """Compile the exported `graph`. `capacity`: tokens that its KV cache holds. Without a plan activations are not
        quantized. Raises an error of the backend."""
        if self.backend in (ORT, ORT_CUDA):
            self._compile_for_ort(graph, engine, plan, one_sequence=self.backend == ORT)
            return
        rows = self.rows(capacity)
        if plan is None:
            build_engine(self.backend, graph, engine, self.shapes, rows, self.gpus, self.cache / "timing")
            return
        quantized = _scratch(engine, "quantized")
        opened = Graph(graph)
        quantize_products(opened, self._applied(plan), SIGNED)
        opened.save(quantized)
        del opened
        build_engine(self.backend, quantized, engine, self.shapes, rows, self.gpus, self.cache / "timing")
        _remove(quantized)

    def compile_for_measuring(self, graph: Path, engine: Path, plan: Plan | None) -> None:
        """The same numbers, as far as they go, on ONNX Runtime's CPU provider. Raises EngineError."""
        self._compile_for_ort(graph, engine, plan, one_sequence=False)

    def _applied(self, plan: Plan) -> Plan:
        """What of `plan` concerns us: where products that compute in more than 8 bits keep their weights, there is
        nothing to smooth for them."""
        if self.precision.weight_bits is not None:
            return plan
        return {name: each for name, each in plan.items() if each.quantized}

    def _compile_for_ort(self, graph: Path, engine: Path, plan: Plan | None, one_sequence: bool) -> None:
        precision, source = self.precision, graph
        on_cpu = self.backend != ORT_CUDA  # measuring, too
        joined, quantized = _scratch(engine, "joined"), _scratch(engine, "quantized")
        if on_cpu:
            join_products(graph, joined)
            source = joined
        if plan is not None or precision.weight_bits is not None:
            opened = Graph(source)
            if plan is not None:
                quantize_products(opened, self._applied(plan), UNSIGNED)
            if precision.weight_bits is not None:
                quantize_weights(opened, precision.weight_bits, precision.block)
            opened.save(quantized)
            source = quantized
            del opened
        general = source
        if on_cpu:
            fuse_for_cpu(source)
            general = _scratch(engine, "general")
            attend_in_several_rows(source, general)
        ort.compile_graph(general, engine, self.backend)
        _describe(engine).write(engine)
        if one_sequence and use_group_query_attention(source, never_one_row=precision.quantized):
            one = one_sequence_file(engine)
            ort.compile_graph(source, one)
            share_weights(one, engine)
            _describe(one).write(one)
        for what in ("joined", "quantized", "general"):
            _remove(_scratch(engine, what))


def _scratch(engine: Path, what: str) -> Path:
    return engine.with_name(f"{engine.stem}-{what}.onnx")


def _remove(graph: Path) -> None:
    for file in graph.parent.glob(f"{graph.name}*"):
        file.unlink()


def _describe(engine: Path) -> EngineLayers:
    graph = onnx.load(engine, load_external_data=False).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    kinds = {value.name: value.type.tensor_type.elem_type for value in values}
    layers = []
    for node in graph.node:
        if node.op_type == "MatMulNBits":
            bits = next(attribute.i for attribute in node.attribute if attribute.name == "bits")
            precision = f"int{bits} weights"
        elif node.op_type == "MatMulIntegerToFloat":
            precision = "int8"
        else:
            # Some outputs have no type written down; what they are made of has.
            known = (PRECISION_NAMES.get(kinds.get(name, 0), "") for name in (node.output[0], *node.input))
            precision = next(filter(None, known), "")
        layers.append(Layer(node.name, node.op_type, precision))
    return EngineLayers(widths=(), slots=0, rows=0, layers=tuple(layers))
