"""The precisions that a bundle can be built in, and how a graph is compiled for each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrun.calibration.plan import Plan
from specrun.calibration.products import Graph
from specrun.calibration.w8a8 import UNSIGNED, quantize_products
from specrun.calibration.weights import quantize_weights
from specrun.engines import ort

# Compiles a graph into an engine.
Compile = Callable[[Path, Path], None]


@dataclass(frozen=True)
class Precision:
    """What graphs are exported in, and what becomes of their weights and activations."""

    name: str
    export: str
    weight_bits: int | None = None
    block: int = 0  # weights that share a scale
    activations: bool = False  # products in 8 bits where a plan says so

    @property
    def quantized(self) -> bool:
        return self.weight_bits is not None

    def compile(self, graph: Path, engine: Path, plan: Plan | None = None) -> None:
        """Compile `graph` for ONNX Runtime. Without a plan only weights are quantized. Raises EngineError."""
        if self.weight_bits is None:
            ort.compile_graph(graph, engine)
            return
        opened = Graph(graph)
        if plan is not None:
            quantize_products(opened, plan, UNSIGNED)
        quantize_weights(opened, self.weight_bits, self.block)
        quantized = engine.with_name(f"{engine.stem}-quantized.onnx")
        opened.save(quantized)
        del opened
        ort.compile_graph(quantized, engine)
        for file in engine.parent.glob(f"{quantized.name}*"):
            file.unlink()


# Block sizes: with 8-bit weights everywhere SmolLM2-135M's perplexity rises by 0.2 % with 16 weights to a scale, by
# 0.7 % with 32 and by 1.8 % with 128. Where the plan takes half of the products anyway, 64 lose no more than 16, and a
# call of five tokens is a tenth faster.
PRECISIONS = {
    each.name: each
    for each in (
        Precision("fp32", "fp32"),
        Precision("fp16", "fp16"),
        Precision("int8", "fp32", weight_bits=8, block=64, activations=True),
        Precision("int8-weights", "fp32", weight_bits=8, block=16),
        Precision("int4-weights", "fp32", weight_bits=4, block=16),
    )
}
