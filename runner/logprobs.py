"""Log-probabilities of emitted tokens, as the plain path gives them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.runner.sampling import log_probabilities

MAX_TOP = 20


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of what the model itself gave an emitted token and its rivals: softmax over the model's
    logits, before processors, temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest token ids, likeliest first

    @classmethod
    def of(cls, logits: np.ndarray[Any, Any], token: int, count: int) -> "TokenLogprobs":
        """`logits` float32 [vocabulary], of the row that `token` was chosen from; `count`: of rivals."""
        best: list[int] = []
        if count:
            least = np.partition(logits, -count)[-count]
            columns = np.flatnonzero(logits >= least)
            best = columns[np.argsort(-logits[columns], kind="stable")][:count].tolist()
        own, *others = log_probabilities(logits, [token, *best]).tolist()
        return cls(own, tuple(zip(best, others, strict=True)))
