"""EAGLE-3: training-time test. The head is unrolled over several positions on its own output, as when it drafts."""

from typing import Any

import torch

from specrun.distill.objective import Objective, Tally, ahead
from specrun.export.eagle import EagleHead

STEPS = 4  # positions that the head is unrolled over


class Eagle3Trainee(torch.nn.Module):
    """The head with its loss, as a training loop wants it."""

    def __init__(self, head: EagleHead, objective: Objective) -> None:
        super().__init__()
        self.head, self.objective = head, objective

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, answer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Arguments as for `MedusaTrainee.forward`. Row t reads token t + 1 with the target's state at t and guesses
        token t + 2; at step s it stands s positions further on, with its own state of the step before.

        Returns what `Tally.result` says.
        """
        size, rows = self.objective.hidden_size, tokens.shape[1] - 2
        tally = Tally(self.objective, tokens, answer, hidden[..., -size:])
        # From step 1 on only rows that count are followed; a row guesses `step` positions further on, so those that
        # stand before the first answer token by less than that count too.
        start = max(0, tally.first_row - STEPS + 1)
        tokens, positions = tokens[:, 1:-1], torch.arange(rows)[None].expand(len(tokens), rows)
        features = self.head.fuse(hidden[:, :rows, :-size].float())
        # At step s a row sees the true rows before it, and its own ones of the steps since.
        cache = _GrowingCache()
        causal, own = torch.ones(rows, rows, dtype=torch.bool).tril(), torch.eye(rows - start, dtype=torch.bool)
        for step in range(STEPS):
            first = start if step else 0
            mask = torch.cat([causal[first:], *[own] * step], 1)[None, None]
            features = self.head.states(
                ahead(tokens, step)[:, first:], features, positions[:, first:] + step, mask, cache
            )
            tally.add(features, self.head.logits)
            features = features[:, start - first :]
        return tally.result()


class _GrowingCache:
    """Keys and values of all steps so far, one step after the other."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, 2), torch.cat(self._values, 2)
