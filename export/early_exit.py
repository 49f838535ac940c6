"""A draft out of the target itself: the same graph with layers left out.

The kept layers read and write the target's own KV cache: a draft's rows lie beyond the committed length, and the
verification that follows overwrites them with the target's. (Zhang et al., "Draft & Verify: Lossless Large Language
Model Acceleration via Self-Speculative Decoding", 2023; Elhoushi et al., "LayerSkip", 2024. Neither a trained exit
nor the reuse of the first layers' work in the verification is done here.)
"""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specrun.engines.signature import Signature, past, present, state
from specrun.export.taps import values_by_name


def skip_layers(model: ir.Model, signature: Signature) -> None:
    """Take the layers in `signature.skipped` out of `model`, an exported graph without taps. In place."""
    values = values_by_name(model)
    for layer in signature.skipped:
        # Layer after layer: a run of skipped ones ends up with the state that entered the first of them.
        entering, leaving = values[state(layer)], values[state(layer + 1)]
        ir.convenience.replace_all_uses_with(leaving, entering)
        values[state(layer + 1)] = entering
    gone = {layer for layer in range(signature.num_layers) if layer in signature.skipped}
    outputs = {present(layer, part) for layer in gone for part in ("key", "value")}
    inputs = {past(layer, part) for layer in gone for part in ("key", "value")}
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name not in outputs]
    RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = [value for value in model.graph.inputs if value.name not in inputs]
