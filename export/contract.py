"""A transformers model with the inputs and outputs of the graph contract."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from specrun.export.attention import ScatterCache, cache_mask
from specrun.export.family import UnsupportedModelError


class ContractModule(torch.nn.Module):
    """A causal language model as it is traced. Beside the logits it returns every hidden state."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache_length: torch.Tensor,
        tree_mask: torch.Tensor,
        caches: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Logits, hidden states (entering each layer, leaving the last, read by the head), caches."""
        mask = cache_mask(cache_length, tree_mask, caches[0].shape[2])
        cache = ScatterCache(caches, cache_length)
        with recorded_states(self.model) as states:
            out = self.model(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=mask,
                cache=cache,
                use_cache=True,
            )
        return out.logits, tuple(states), tuple(cache.updated)


@contextlib.contextmanager
def recorded_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects, while `model` runs, the state that enters each layer, the one that leaves the last layer, and
    what the language model head reads: one more entry each than there are layers, in this order.
    """
    states: list[torch.Tensor] = []

    def record_input(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states.append(arguments[0] if arguments else keywords["hidden_states"])

    def record_output(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        states.append(output if isinstance(output, torch.Tensor) else output[0])

    layers = decoder_layers(model)
    hooks = [layer.register_forward_pre_hook(record_input, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(record_output))
    hooks.append(model.get_output_embeddings().register_forward_pre_hook(record_input, with_kwargs=True))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def decoder_layers(model: Any) -> Any:
    """The list of decoder layers. Raises UnsupportedModelError."""
    count = model.config.num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(f"{type(model).__name__} keeps its {count} layers in no single list")
