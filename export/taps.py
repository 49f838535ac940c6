"""Give an exported graph the output `hidden_states`: the states that a proposer wants of the target."""

import onnx_ir as ir

from specrun.engines.signature import HIDDEN_STATES, NORMED_STATE, OPSET, Signature, state


def add_taps(model: ir.Model, signature: Signature) -> None:
    """Add to `model`, an exported graph, the states that `signature.taps` names, side by side. In place."""
    values = values_by_name(model)
    names = [NORMED_STATE if tap == signature.num_layers else state(tap) for tap in signature.taps]
    joined = ir.node("Concat", [values[name] for name in names], attributes={"axis": -1}, version=OPSET)
    output = joined.outputs[0]
    output.name = HIDDEN_STATES
    output.type, output.shape = values[names[0]].type, ir.Shape(signature.outputs()[HIDDEN_STATES])
    model.graph.append(joined)
    model.graph.outputs.insert(1, output)


def values_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """Every input and computed value of the main graph."""
    produced = [output for node in model.graph for output in node.outputs]
    return {str(value.name): value for value in [*model.graph.inputs, *produced]}
