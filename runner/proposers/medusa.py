"""Medusa heads guess several positions at once from one hidden state of the target (see export/medusa.py)."""

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np

from specrun.runner.draft_tree import CHAIN, TreeShape
from specrun.runner.logits import Logits, Place
from specrun.runner.sampling import Chooser, Guesses
from specrun.runner.types import EMPTY, ROOT, Proposal

Array = np.ndarray[Any, Any]


class Medusa:
    """No head knows what the one before it guessed, so the tree is made of the candidates of each, combined; the
    most likely combinations are proposed."""

    def __init__(self, heads: Callable[[Array], Logits], shape: TreeShape = CHAIN) -> None:
        """`heads`: a row of logits for each head out of a hidden state [hidden]."""
        self._heads = heads
        self._shape = shape
        self._hidden: Array | None = None

    def start(self, reused: int = 0) -> None:
        self._hidden = None

    def observe(self, hidden: Array | None) -> None:
        assert hidden is not None, "the target has no taps"
        self._hidden = hidden[-1].copy()

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        if self._hidden is None:  # a prompt of one token
            return EMPTY
        logits = self._heads(self._hidden)
        # The tokens in between are known to no head, so nor to the processors.
        places = [Place(ahead, len(tokens) + ahead, None if ahead else ()) for ahead in range(min(limit, len(logits)))]
        return _combine(logits.guess(places, chooser, self._shape.breadth), self._shape)


def _combine(candidates: list[Guesses], shape: TreeShape) -> Proposal:
    """The most likely paths of the candidates at each depth."""
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[Array] = []
    # Best first. A path's next rivals are its first child and its next sibling: neither is more likely than itself.
    queue: list[tuple[float, int, int, int]] = []  # minus score, depth, rank, parent

    def push(score: float, depth: int, rank: int, parent: int) -> None:
        if depth < len(candidates) and rank < len(candidates[depth].tokens):
            heapq.heappush(queue, (-(score + float(candidates[depth].shares[rank])), depth, rank, parent))

    push(0.0, 0, 0, ROOT)
    while queue and (shape.nodes is None or len(tokens) < shape.nodes):
        negative, depth, rank, parent = heapq.heappop(queue)
        score = -negative
        if score < shape.least_score:
            break
        push(score - float(candidates[depth].shares[rank]), depth, rank + 1, parent)
        push(score, depth + 1, 0, len(tokens))
        tokens.append(int(candidates[depth].tokens[rank]))
        parents.append(parent)
        if (drawn_from := candidates[depth].probs) is not None:
            probs.append(drawn_from)
    return Proposal(tuple(tokens), tuple(parents), tuple(probs) or None)
