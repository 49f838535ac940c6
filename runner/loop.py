"""The round: propose, verify, accept, commit. Plain decoding is the same loop with nothing proposed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.runner.acceptor import accept
from specrun.runner.proposers import Proposer
from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, prefill
from specrun.runner.statistics import Statistics
from specrun.runner.types import EMPTY, FinishReason, Origin, Proposal, Token, Verdict


@dataclass(frozen=True)
class Limits:
    """What ends a generation, and how far it may speculate."""

    max_tokens: int
    stop_token_ids: frozenset[int]
    k: int
    prefill_width: int


# Called with the position of a new token and the logits it was chosen from.
Observer = Callable[[int, np.ndarray[Any, Any]], None]


def decode(
    target: Session,
    proposer: Proposer | None,
    prompt: list[int],
    chooser: Chooser,
    limits: Limits,
    statistics: Statistics,
    observe: Observer | None = None,
) -> Iterator[Token]:
    """Yield the tokens that follow `prompt`, one by one; the last one carries the finish reason.

    The prompt must be shorter than the target's capacity. A token in `stop_token_ids` is emitted and ends the
    generation; nothing after it is, even if the same round accepted more.
    """
    tokens = list(prompt)
    remaining = min(limits.max_tokens, target.capacity - len(tokens))
    statistics.prompt_tokens = len(prompt)
    with statistics.timed("prefill"):
        target.truncate(0)
        prefill(target, tokens[:-1], limits.prefill_width)
    if proposer is not None:
        proposer.start(tokens)
    while True:
        # The round itself adds a token, so more than remaining - 1 guesses would be for nothing.
        limit = min(limits.k, remaining - 1)
        with statistics.timed("propose"):
            proposal = proposer.propose(tokens, limit, chooser) if proposer and limit > 0 else EMPTY
        with statistics.timed("verify"):
            logits = target.forward([tokens[-1], *proposal.tokens])
        with statistics.timed("accept"):
            verdict = accept(proposal, logits, chooser, len(tokens))
        statistics.count_round(len(proposal.tokens), verdict.accepted)
        for index, (token_id, origin) in enumerate(_emitted(proposal, verdict)):
            if observe is not None:
                observe(len(tokens), logits[index])
            tokens.append(token_id)
            remaining -= 1
            statistics.emitted += 1
            finish: FinishReason | None = "length" if remaining == 0 else None
            if token_id in limits.stop_token_ids:
                finish = "stop"
            yield Token(token_id, origin, finish)
            if finish is not None:
                return
        target.truncate(len(tokens) - 1)
        if proposer is not None:
            proposer.truncate(len(tokens) - 1)


def _emitted(proposal: Proposal, verdict: Verdict) -> Iterator[tuple[int, Origin]]:
    for token_id in proposal.tokens[: verdict.accepted]:
        yield token_id, "drafted"
    if not proposal.tokens:
        yield verdict.next_token, "plain"
    else:
        yield verdict.next_token, "bonus" if verdict.accepted == len(proposal.tokens) else "correction"
