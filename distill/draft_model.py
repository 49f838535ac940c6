"""A small language model learns the target's distribution, token by token (Hinton et al., "Distilling the Knowledge
in a Neural Network", 2015)."""

from typing import Any

import torch

from specrun.distill.objective import Objective, Tally, ahead

VALIDATION_POSITIONS = 4


class DraftModelTrainee(torch.nn.Module):
    """The model with its loss, as a training loop wants it."""

    def __init__(self, model: Any, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, answer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments as for `MedusaTrainee.forward`; returns what `Tally.result` says. The true tokens are read, which
        are its own guesses wherever those were right."""
        states = self.model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[:, 1:]
        tally = Tally(self.objective, tokens, answer, hidden[..., -self.objective.hidden_size :])
        for step in range(1 if self.training else VALIDATION_POSITIONS):
            tally.add(ahead(states, step), self.model.get_output_embeddings())
        return tally.result()
