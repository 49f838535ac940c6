"""Fewer, standard operators: RMSNormalization and RotaryEmbedding where the traced pattern allows it.

The rules come from onnxscript; it applies them by itself only at opset 23, though both operators are the
same at 24. TensorRT has native layers for them.
"""

from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules.fusion import _rms_normalization, _rotary_embedding


class _HalfRotaryEmbedding(_rotary_embedding.RotaryEmbedding23Fusion):  # type: ignore[misc] # no types published
    """onnxscript's rule for models in half precision, which compute the angles in fp32 and then cast."""

    def pattern(
        self,
        op: Any,
        x: Any,
        freqs: Any,
        start1: Any,
        end1: Any,
        start2: Any,
        end2: Any,
        one1: Any,
        one2: Any,
        dtype: Any,
    ) -> Any:
        repeated = op.Concat(freqs, freqs, axis=-1)
        cos = op.Unsqueeze(op.Cast(op.Cos(repeated), to=dtype), one1)
        sin = op.Unsqueeze(op.Cast(op.Sin(repeated), to=dtype), one2)
        return x * cos + _rotary_embedding._rotate_half_pattern(op, x, start1, end1, start2, end2) * sin

    def rewrite(self, op: Any, x: Any, freqs: Any, dtype: Any, **_: Any) -> Any:
        cos, sin = op.Cast(op.Cos(freqs), to=dtype), op.Cast(op.Sin(freqs), to=dtype)
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


_HALF_ROTARY = pattern.RewriteRuleSet([_HalfRotaryEmbedding.rule()])


def fuse(model: ir.Model) -> None:
    """Rewrite `model` in place."""
    _rms_normalization.fuse_rms_normalization(model)
    _cast_norm_inputs(model.graph)
    _rotary_embedding.fuse_rotary_embedding(model)
    _HALF_ROTARY.apply_to_model(model)
    _rotary_embedding.fuse_partial_rotary_embedding(model)
    # Each rotary rewrite brings its own cosine and sine; all layers share one.
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


def _cast_norm_inputs(graph: ir.Graph) -> None:
    """Put back the cast that the rule drops where a half-precision model normalizes and scales in fp32.

    The operator's output has the type of its scale; the ONNX checker takes it to be that of its input, so the
    two must agree.
    """
    for node in list(graph):
        if node.op_type != "RMSNormalization":
            continue
        rows, scale = node.inputs[0], node.inputs[1]
        assert rows is not None
        assert scale is not None
        if rows.dtype != scale.dtype and scale.dtype is not None:
            cast = ir.node("Cast", [rows], attributes={"to": scale.dtype})
            cast.outputs[0].dtype, cast.outputs[0].shape = scale.dtype, rows.shape
            graph.insert_before(node, cast)
            node.replace_input_with(0, cast.outputs[0])
