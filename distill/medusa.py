"""Medusa: each head learns the target's distribution some positions ahead, from one hidden state."""

import torch

from specrun.distill.objective import Objective, Tally
from specrun.export.medusa import MedusaHeads


class MedusaTrainee(torch.nn.Module):
    """The heads with their loss, as a training loop wants it."""

    def __init__(self, heads: MedusaHeads, objective: Objective) -> None:
        super().__init__()
        self.heads, self.objective = heads, objective

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, answer: torch.Tensor) -> dict[str, torch.Tensor]:
        """tokens int64 [batch, T], hidden [batch, T - 1, (taps + 1) * hidden] (the last part is what the target's
        head reads), answer bool [batch, T]. Head h reads the state at t and guesses token t + 2 + h.

        Returns what `Tally.result` says.
        """
        normed = hidden[..., -self.objective.hidden_size :].float()
        tally = Tally(self.objective, tokens, answer, normed)
        for head in self.heads:
            tally.add(normed[:, :-1], head)
        return tally.result()
