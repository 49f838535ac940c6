"""Medusa heads: small networks beside the language model head, one for each further position.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024. The paper's
"typical acceptance" is not used: it changes the output.
"""

import logging
from typing import Any

import torch

from specrun.export.checkpoint import CheckpointError
from specrun.export.eagle_layout import TargetShape, read_vocabulary

logger = logging.getLogger(__name__)


class MedusaHeads(torch.nn.ModuleList):
    """The heads, with the names of published checkpoints: `{head}.{layer}.linear.*` and `{head}.{layers}.weight`.

    Head h guesses the token h + 2 positions after the one whose hidden state it reads (the language model head
    itself chooses the one before).
    """

    def __init__(self, heads: int, layers: int, hidden: int, draft_vocab_size: int) -> None:
        super().__init__(
            torch.nn.Sequential(
                *(_ResidualBlock(hidden) for _ in range(layers)),
                torch.nn.Linear(hidden, draft_vocab_size, bias=False),
            )
            for _ in range(heads)
        )

        self.hidden_size = hidden

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [batch, tokens, hidden] -> logits [batch, tokens, heads, draft vocabulary]."""
        return torch.stack([head(hidden_states) for head in self], 2)


class _ResidualBlock(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.nn.functional.silu(self.linear(hidden))


def read_medusa(
    name: str, config: dict[str, Any], weights: dict[str, torch.Tensor], target: TargetShape
) -> tuple[MedusaHeads, torch.Tensor | None]:
    """Heads as published, and the target's id of each of their tokens, or None where the vocabularies are the same.

    The weights count: published configs often state another number of heads, which is reported. Raises
    CheckpointError.
    """
    weights = {key.removeprefix("medusa_head."): value for key, value in weights.items()}
    numbers = sorted({int(head) for key in weights if (head := key.split(".")[0]).isdigit()})
    layers = len({key.split(".")[1] for key in weights if key.startswith("0.") and ".linear." in key})
    if numbers != list(range(len(numbers))) or not numbers or not layers:
        raise CheckpointError(
            f"{name} has no complete Medusa heads: got {sorted(weights)[:4]}, expected 0.0.linear.weight and so on"
        )
    for what, key, counted in (("heads", "medusa_num_heads", len(numbers)), ("layers", "medusa_num_layers", layers)):
        if config.get(key, counted) != counted:
            logger.warning(
                "%s: its config says %s = %s, its weights have %d %s; the weights count",
                name,
                key,
                config[key],
                counted,
                what,
            )
    rows = weights.get(f"0.{layers}.weight", target.lm_head).shape[0]
    vocabulary = read_vocabulary(name, weights, rows, target.vocab_size)
    heads = MedusaHeads(len(numbers), layers, target.hidden_size, rows)
    expected = {key: tuple(value.shape) for key, value in heads.state_dict().items()}
    got = {key: tuple(value.shape) for key, value in weights.items()}
    if got != expected:
        differing = sorted(key for key in got.keys() | expected.keys() if got.get(key) != expected.get(key))
        first = differing[0]
        raise CheckpointError(
            f"{name} does not fit {target.name}: {first} is {got.get(first, 'missing')}, expected "
            f"{expected.get(first, 'nothing of that name')}; {len(differing)} such differences"
        )
    heads.load_state_dict(weights)
    return heads, vocabulary
