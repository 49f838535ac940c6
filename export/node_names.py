"""Nodes named after the module that they come from, so that inspectors, profilers and messages can be read."""

import ast
from collections import Counter

import onnx_ir as ir

SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of nodes: a Python list, from the model to the operation


def name_nodes(model: ir.Model) -> None:
    """`model.layers.0.self_attn.q_proj/MatMul` and so on; with a number where a module has several of a type."""
    counts: Counter[str] = Counter()
    for node in model.graph:
        scopes = [scope for scope in ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))[:-1] if scope]
        module = scopes[-1] if scopes else "graph"
        name = f"{module.removeprefix('model.')}/{node.op_type}"
        counts[name] += 1
        node.name = name if counts[name] == 1 else f"{name}_{counts[name]}"
