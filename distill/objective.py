"""What is learned, whatever learns it: the target's distribution over the draft's vocabulary."""

from collections.abc import Callable

import torch

# Later positions matter less: they count only if all before them were accepted (0.8 as in EAGLE and Medusa).
POSITION_DECAY = 0.8


class Objective:
    """Cross-entropy between the target's distribution and the draft's, over the draft's vocabulary."""

    def __init__(self, lm_head: torch.Tensor, draft_vocabulary: torch.Tensor) -> None:
        """`lm_head` [vocabulary, hidden] of the target; `draft_vocabulary` int64 [draft size]: its token ids."""
        self._head = lm_head[draft_vocabulary].float().contiguous()
        self._draft_id = torch.full((lm_head.shape[0],), -1)
        self._draft_id[draft_vocabulary] = torch.arange(len(draft_vocabulary))

    @property
    def hidden_size(self) -> int:
        return self._head.shape[1]

    @torch.no_grad()
    def probs(self, normed: torch.Tensor) -> torch.Tensor:
        """The target's probabilities [..., draft size] of the next token, from what its head reads [..., hidden]."""
        return (normed.float() @ self._head.T).softmax(-1)

    def draft_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Position of each token in the draft's vocabulary; -1 where it is not in it."""
        return self._draft_id[tokens]


class Tally:
    """Loss and acceptance over the drafted positions of one batch.

    Row t of a draft guesses the tokens t + 2, t + 3, ... in turn. Only what the target wrote counts, so logits are
    computed for those rows alone.
    """

    def __init__(self, objective: Objective, tokens: torch.Tensor, answer: torch.Tensor, normed: torch.Tensor) -> None:
        """tokens int64 [batch, T]; answer bool [batch, T]: what the target wrote; normed [batch, T - 1, hidden]: what
        its language model head read."""
        self._answer = answer[:, 2:]
        self._wanted = objective.draft_ids(tokens[:, 2:])
        # The target's distribution, once for each row that counts, and where to find it.
        self._probs = objective.probs(normed[:, 1:][self._answer])
        self._place = torch.zeros(self._answer.shape, dtype=torch.int64)
        self._place[self._answer] = torch.arange(len(self._probs))
        self._alive = self._answer
        self._step = 0
        self.loss = torch.zeros(())
        self.hits: list[torch.Tensor] = []
        self.tries: list[torch.Tensor] = []

    @property
    def first_row(self) -> int:
        """The first row that counts in any conversation."""
        return int(self._answer.any(0).int().argmax())

    def add(self, states: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """The guesses for the next position. states [batch, T - 2 - first, hidden], of the rows from some `first` on
        that is not beyond `first_row`; `head` makes logits of them."""
        step, first = self._step, self._answer.shape[1] - states.shape[1]
        answer = ahead(self._answer, step)
        logits = head(states[answer[:, first:]])
        wanted = ahead(self._wanted, step)[answer]
        known = wanted >= 0
        if known.any():
            probs = self._probs[ahead(self._place, step)[answer][known]]
            loss = torch.nn.functional.cross_entropy(logits[known], probs)
            self.loss = self.loss + POSITION_DECAY**step * loss
        tried = self._alive & answer
        right = torch.zeros_like(tried)
        right[answer] = logits.detach().argmax(-1) == wanted
        self._alive = tried & right
        self.tries.append(tried.sum())
        self.hits.append(self._alive.sum())
        self._step += 1

    def result(self) -> dict[str, torch.Tensor]:
        """`loss`; `hits` and `tries` [positions]: guesses that were right, and made, where all earlier ones of the
        row were right."""
        return {"loss": self.loss, "hits": torch.stack(self.hits), "tries": torch.stack(self.tries)}


def ahead(rows: torch.Tensor, step: int) -> torch.Tensor:
    """[batch, rows, ...] moved `step` to the left; what comes in at the end is zero (false, and so never counted)."""
    return rows if step == 0 else torch.cat([rows[:, step:], torch.zeros_like(rows[:, :step])], 1)
