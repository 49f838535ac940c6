"""Attention and the KV cache as ONNX operators, handed to transformers through its own interfaces.

The transformers class is traced unmodified: its attention function is exchanged through
`AttentionInterface`, its cache by a `Cache` whose update is a `TensorScatter`.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from specrun.export.family import UnsupportedModelError

ATTENTION = "specrun_onnx"

# Keyword arguments of transformers' attention functions that change the result and that the ONNX operator
# has no input for.
UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "sinks", "head_mask")


def onnx_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the whole cache under an explicit mask.

    query [batch, heads, tokens, head_dim]; key, value [batch, kv_heads, capacity, head_dim];
    attention_mask bool [batch, 1, tokens, capacity]. Returns [batch, tokens, heads, head_dim].
    """
    for name in UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedModelError(f"its attention uses {name}, for which the ONNX operator has no input")
    if softcap is not None:
        out = _softcapped(query, key, value, attention_mask, scaling, softcap)
    else:
        out = torch.onnx.ops.attention(query, key, value, attention_mask, scale=scaling)[0]
    return out.transpose(1, 2), None


def _softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """The same from elementary operators: TensorRT's Attention has no soft cap (Gemma 2)."""
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    # Grouped queries: the heads of one group meet their shared key without copying it.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * tokens, head_dim)
    scores = (grouped @ key.transpose(2, 3)) * (scaling or head_dim**-0.5)
    scores = torch.tanh(scores.float() / softcap) * softcap
    scores = scores.reshape(batch, heads, tokens, -1).masked_fill(~mask, float("-inf"))
    weights = scores.softmax(-1).to(value.dtype).reshape(batch, kv_heads, heads // kv_heads * tokens, -1)
    return (weights @ value).reshape(batch, heads, tokens, -1)


AttentionInterface.register(ATTENTION, onnx_attention)


class ScatterCache(Cache):  # type: ignore[misc] # transformers publishes no types
    """A static cache: new rows are written at `cache_length` into buffers that come in from outside."""

    is_compileable = False

    def __init__(self, buffers: tuple[torch.Tensor, ...], cache_length: torch.Tensor) -> None:
        """`buffers`: key and value of each layer in turn, [batch, kv_heads, capacity, head_dim]."""
        self.buffers = buffers
        self.cache_length = cache_length
        self.updated: list[torch.Tensor] = list(buffers)
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for offset, rows in enumerate((key_states, value_states)):
            buffer = self.buffers[2 * layer_idx + offset]
            self.updated[2 * layer_idx + offset] = torch.onnx.ops.symbolic(
                "TensorScatter",
                [buffer, rows, self.cache_length],
                {"axis": 2},
                dtype=buffer.dtype,
                shape=buffer.shape,
                version=24,
            )
        return self.updated[2 * layer_idx], self.updated[2 * layer_idx + 1]

    # The mask and the positions are explicit inputs; nothing may be derived from these.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.buffers[0].shape[2], 0


def cache_mask(cache_length: torch.Tensor, tree_mask: torch.Tensor, capacity: Any) -> torch.Tensor:
    """Which cache rows each token may attend to: bool [batch, 1, tokens, capacity].

    The rows of this call and those just before it as `tree_mask` [batch, tokens, tree] says, and all earlier
    ones. What lies beyond this call is left over from rejected tokens and is never seen.
    """
    tokens, tree = tree_mask.shape[1], tree_mask.shape[2]
    first = cache_length[:, None] + tokens - tree  # the row of column 0
    offset = torch.arange(capacity)[None, :] - first  # [batch, capacity]
    column = offset.clamp(0, tree - 1)[:, None, :].expand(-1, tokens, -1)
    in_tree = torch.gather(tree_mask, 2, column) & (offset < tree)[:, None, :]
    return ((offset < 0)[:, None, :] | in_tree)[:, None]
