"""Trace a transformers model into one ONNX graph of standard operators."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from specrun.engines.errors import SpecrunError, first_line
from specrun.engines.signature import LOGITS, NORMED_STATE, OPSET, Signature, present, state
from specrun.export.attention import ATTENTION
from specrun.export.axes import name_axes
from specrun.export.contract import ContractModule
from specrun.export.fusion import fuse
from specrun.export.node_names import name_nodes

# Sizes of the example inputs. All axes they show are dynamic; the numbers only have to differ from each
# other and from 1, so that the tracer does not take two axes for one.
EXAMPLE_BATCH, EXAMPLE_TOKENS, EXAMPLE_TREE, EXAMPLE_CAPACITY = 2, 5, 7, 32


class TraceError(SpecrunError):
    """torch.onnx cannot trace this model."""


def signature_of(model: Any) -> Signature:
    """The graph signature of a transformers model, read off a forward pass of one token.

    Configs name these sizes in many ways, and sometimes name sizes that the model does not use.
    Raises TraceError for caches that are not the same in every layer.
    """
    with torch.no_grad():
        out = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True)
    shapes = {tuple(rows.shape) for layer in out.cache.layers for rows in (layer.keys, layer.values)}
    if len(shapes) != 1:
        raise TraceError(
            f"{type(model).__name__} has caches of several shapes, {sorted(shapes)}; expected the same for the "
            f"keys and values of every layer"
        )
    _, kv_heads, _, head_dim = shapes.pop()
    return Signature(
        num_layers=len(out.cache.layers),
        kv_heads=int(kv_heads),
        head_dim=int(head_dim),
        vocab_size=int(out.logits.shape[-1]),
        hidden_size=int(model.get_output_embeddings().weight.shape[1]),
    )


def trace(model: Any, signature: Signature) -> ir.Model:
    """One graph with dynamic batch, tokens, tree and capacity. `model`: a transformers causal language model.

    Its hidden states keep the names of the contract (`state`), as values inside the graph. Raises TraceError.
    """
    inputs = signature.inputs()
    dynamic = torch.export.Dim.DYNAMIC
    named = [{axis: dynamic for axis, name in enumerate(shape) if isinstance(name, str)} for shape in inputs.values()]
    states = [*(state(index) for index in range(signature.num_layers + 1)), NORMED_STATE]
    with onnx_attention_in(model):
        traced = to_onnx(
            ContractModule(model),
            example_inputs(signature, model.dtype),
            (*named[:4], tuple(named[4:])),
            list(inputs),
            [LOGITS, *states, *(present(*part) for part in signature.cache_parts())],
        )
    fuse(traced)
    graph = traced.graph
    graph.outputs[:] = [value for value in graph.outputs if value.name not in states]
    name_axes(traced, signature)
    return traced


def to_onnx(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    inputs: list[str],
    outputs: list[str],
) -> ir.Model:
    """What torch.onnx makes of `module`. Raises TraceError."""
    traced = getattr(module, "model", module)  # for messages: what is inside the wrapper
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                module,
                arguments,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=dynamic_shapes,
                input_names=inputs,
                output_names=outputs,
                verbose=False,
            )
    except Exception as error:  # the exporter wraps whatever the model's code raised
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise TraceError(f"torch.onnx cannot trace {type(traced).__name__}: {first_line(cause)}") from error
    assert program is not None
    return program.model


def save(model: ir.Model, path: Path) -> None:
    """Write the graph to `path` and its weights beside it, in one external file."""
    name_nodes(model)
    ir.save(model, path, external_data=path.name + ".data")


def example_inputs(signature: Signature, dtype: torch.dtype) -> tuple[Any, ...]:
    batch, tokens, tree, capacity = EXAMPLE_BATCH, EXAMPLE_TOKENS, EXAMPLE_TREE, EXAMPLE_CAPACITY
    cache = (batch, signature.kv_heads, capacity, signature.head_dim)
    return (
        torch.zeros(batch, tokens, dtype=torch.int64),
        torch.arange(tokens).expand(batch, tokens),
        torch.zeros(batch, dtype=torch.int64),
        torch.ones(batch, tokens, tree, dtype=torch.bool),
        tuple(torch.zeros(cache, dtype=dtype) for _ in signature.cache_parts()),
    )


@contextlib.contextmanager
def onnx_attention_in(model: Any) -> Iterator[None]:
    """Let `model` attend through the ONNX operator, then as before: validation needs the original."""
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns about its own internals, and about torchvision, which no language model needs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
