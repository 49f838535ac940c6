"""Accept or reject: compare a proposal with the target's own choices."""

from typing import Any

import numpy as np

from specrun.runner.rejection import accept_by_rejection
from specrun.runner.sampling import Chooser
from specrun.runner.types import ROOT, Proposal, Verdict


def accept(proposal: Proposal, logits: np.ndarray[Any, Any], chooser: Chooser, position: int) -> Verdict:
    """Judge a chain or a tree. A proposed token is accepted exactly when it is the target's choice.

    `logits` float32 [1 + len(proposal.tokens), vocabulary]: row 0 follows the last committed token, row i + 1 follows
    node i. `position`: of the first proposed token in the sequence. The first choice that was not proposed is the
    correction token, or the bonus token below a leaf. Raises LogitsError.

    So the output is what plain decoding with the same chooser gives, whoever proposed (Daliri, Musco, Suresh,
    "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024). A request that asks for it is
    judged by the rejection rule instead.
    """
    if chooser.sampling.rejects:
        return accept_by_rejection(proposal, logits, chooser, position)
    node = ROOT
    path: list[int] = []
    tokens: list[int] = []
    while True:
        choice = chooser.choose(logits[node + 1], position + len(path), tokens)
        child = proposal.children(node).get(choice)
        if child is None:
            return Verdict(tuple(path), choice)
        path.append(child)
        tokens.append(choice)
        node = child
