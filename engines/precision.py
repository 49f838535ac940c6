"""The precisions that a bundle can be built in, by backend."""

from dataclasses import dataclass

from specrun.engines.backend import ORT, ORT_CUDA, TENSORRT, TENSORRT_RTX
from specrun.engines.errors import SpecrunError


class PrecisionError(SpecrunError):
    """A backend has no such precision."""


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
        return self.activations or self.weight_bits is not None


FP16 = Precision("fp16", "fp16")
# Block sizes: with 8-bit weights everywhere SmolLM2-135M's perplexity rises by 0.2 % with 16 weights to a scale, by
# 0.7 % with 32 and by 1.8 % with 128. Where the plan takes half of the products anyway, 64 lose no more than 16, and a
# call of five tokens is a tenth faster.
ORT_PRECISIONS = (
    Precision("fp32", "fp32"),
    FP16,
    Precision("int8", "fp32", weight_bits=8, block=64, activations=True),
    Precision("int8-weights", "fp32", weight_bits=8, block=16),
    Precision("int4-weights", "fp32", weight_bits=4, block=16),
)
# TensorRT has no fused attention for fp32. What the plan leaves out of 8 bits stays in fp16.
TENSORRT_PRECISIONS = (FP16, Precision("int8", "fp16", activations=True))
# The first of each is the default.
PRECISIONS = {
    ORT: ORT_PRECISIONS,
    ORT_CUDA: (FP16, ORT_PRECISIONS[0]),
    TENSORRT: TENSORRT_PRECISIONS,
    TENSORRT_RTX: TENSORRT_PRECISIONS,
}


def find_precision(backend: str, name: str | None) -> Precision:
    """The precision called `name`, or the default of `backend`, which must be known. Raises PrecisionError."""
    known = PRECISIONS[backend]
    for precision in known:
        if name in (None, precision.name):
            return precision
    names = ", ".join(precision.name for precision in known)
    raise PrecisionError(f"got precision {name!r}, the backend {backend} has {names}")
