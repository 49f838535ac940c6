"""The rejection rule: an option for chains. The same distribution as plain decoding, but other tokens.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2022; Chen et al., "Accelerating Large
Language Model Decoding with Speculative Sampling", 2023. It accepts a little more often than shared noise does where
the draft samples, and gives up that the output is the same with and without speculation.

A position's random numbers are the first four words of its stream (`noise.py`): two decide about the draft's token,
two make the token that replaces it. The draft draws from another stream, so the two are independent.
"""

from typing import Any

import numpy as np

from specrun.runner import noise
from specrun.runner.arithmetic import MASS_BITS
from specrun.runner.sampling import Chooser
from specrun.runner.types import Proposal, Verdict

Array = np.ndarray[Any, Any]


def accept_by_rejection(proposal: Proposal, logits: Array, chooser: Chooser, position: int) -> Verdict:
    """Judge a chain; parameters as for `accept`. A token is accepted if u * draft_probs < target_probs, with u uniform
    in [0, 1). Otherwise the next token is drawn from max(target_probs - draft_probs, 0), where that vanishes by
    rounding from target_probs."""
    tokens: list[int] = []
    while True:
        index = len(tokens)
        target_probs, mass = chooser.probabilities(logits[index], position + index, tokens)
        accepting, drawing = _random(chooser.seed, position + index)
        if index == len(proposal.tokens):
            return Verdict(tuple(range(index)), _draw(mass, drawing))
        token = proposal.tokens[index]
        draft_probs = _draft_probs(proposal, index, len(target_probs))
        known = token < len(target_probs)  # a lookup may copy a padding id from the prompt
        # Products of a 24-bit number and one of at most 53 bits, compared in double precision.
        if not (known and accepting * float(draft_probs[token]) < float(target_probs[token])):
            residual = np.maximum(target_probs - draft_probs, np.float32(0))
            residual_mass = (residual * np.float32(2.0**MASS_BITS)).astype(np.int64)
            return Verdict(tuple(range(index)), _draw(residual_mass if residual_mass.any() else mass, drawing))
        tokens.append(token)


def _draft_probs(proposal: Proposal, index: int, vocabulary_size: int) -> Array:
    probs = np.zeros(vocabulary_size, np.float32)
    if proposal.draft_probs is None:
        probs[proposal.tokens[index] : proposal.tokens[index] + 1] = 1
    else:
        known = proposal.draft_probs[index]
        probs[: len(known)] = known
    return probs


def _random(seed: int, position: int) -> tuple[float, int]:
    """A multiple of 2**-53 in [0, 1), and an integer of 64 bits."""
    words = noise.words(seed, position, 4, noise.REJECTION_STREAM)
    accepting, drawing = (int(words[at]) | int(words[at + 1]) << 32 for at in (0, 2))
    return (accepting >> 11) * 2.0**-53, drawing


def _draw(mass: Array, random: int) -> int:
    """The token that a point of the summed mass falls on, the point being the 64-bit `random` scaled to its range."""
    reached = mass.cumsum()
    return int(np.searchsorted(reached, random * int(reached[-1]) >> 64, side="right"))
