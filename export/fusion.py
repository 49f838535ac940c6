"""Fewer, standard operators: RMSNormalization and RotaryEmbedding where the traced pattern allows it.

The rules come from onnxscript; it applies them by itself only at opset 23, though both operators are the
same at 24. TensorRT has native layers for them.
"""

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript.rewriter.rules.fusion import _rms_normalization, _rotary_embedding


def fuse(model: ir.Model) -> dict[str, int]:
    """Rewrite `model` in place. Returns how many of each operator were made."""
    counts = {
        "RMSNormalization": _rms_normalization.fuse_rms_normalization(model),
        "RotaryEmbedding": _rotary_embedding.fuse_rotary_embedding(model),
    }
    _rotary_embedding.fuse_partial_rotary_embedding(model)
    # Each rotary rewrite brings its own cosine and sine; all layers share one.
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    return counts
