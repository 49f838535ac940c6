"""What an engine is made of, written down when it is built: to look inside needs a GPU, or packages of the build."""

import json
from dataclasses import dataclass
from pathlib import Path

from specrun.engines.schema import from_json, to_json

SUFFIX = ".layers.json"
PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulIntegerToFloat")
ATTENTION = ("ATTENTION_INPUT", "Attention", "GroupQueryAttention")


@dataclass(frozen=True)
class Layer:
    name: str
    type: str  # as the backend calls it
    precision: str  # that it computes in: "fp32", "fp16", "int8", "int4"; "" where it computes no numbers

    @property
    def computes(self) -> bool:
        """Whether it is one of those that cost the time: a matrix product or attention."""
        return self.type in PRODUCTS or self.is_attention

    @property
    def is_attention(self) -> bool:
        return self.type in ATTENTION


@dataclass(frozen=True)
class EngineLayers:
    """Of one engine."""

    widths: tuple[int, ...]  # tokens per call, one profile each; empty: any
    slots: int  # sequences per call at most; 0: any number
    rows: int  # of its KV cache's buffers; 0: any, or none
    layers: tuple[Layer, ...]

    def write(self, engine: Path) -> None:
        """Beside `engine`."""
        layers_file(engine).write_text(json.dumps(to_json(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, engine: Path) -> "EngineLayers":
        """Raises SchemaError."""
        file = layers_file(engine)
        return from_json(cls, json.loads(file.read_bytes()), str(file))


def layers_file(engine: Path) -> Path:
    return engine.with_name(engine.name + SUFFIX)
