"""Accept or reject: compare a proposal with the target's own choices."""

from typing import Any

import numpy as np

from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal, Verdict


def accept(proposal: Proposal, logits: np.ndarray[Any, Any], chooser: Chooser, position: int) -> Verdict:
    """Judge a chain. A proposed token is accepted exactly when it is the target's choice.

    `logits` [1 + len(proposal), vocabulary]: row i follows the first i proposed tokens. `position`: of the
    first proposed token in the sequence. The first choice that was not proposed is the correction token, or
    the bonus token after a chain that was accepted whole.

    So the output is what plain decoding with the same chooser gives, whoever proposed (Daliri, Musco, Suresh,
    "Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024).
    """
    for index, proposed in enumerate(proposal.tokens):
        choice = chooser.choose(logits[index], position + index)
        if choice != proposed:
            return Verdict(index, choice)
    last = len(proposal.tokens)
    return Verdict(last, chooser.choose(logits[last], position + last))
