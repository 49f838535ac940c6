"""The round: propose, verify, accept, commit. Plain decoding is the same loop with nothing proposed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.runner.pace import RequestPace
from specrun.runner.proposers import Proposer
from specrun.runner.sampling import Chooser
from specrun.runner.session import Session, feed
from specrun.runner.statistics import Statistics
from specrun.runner.types import EMPTY, ROOT, FinishReason, Origin, Proposal, Token, Verdict


@dataclass(frozen=True)
class Limits:
    """What ends a generation, and how far it may speculate."""

    max_tokens: int
    stop_token_ids: frozenset[int]
    k: int
    prefill_width: int


# Called with the position of a new token, the logits it was chosen from, and the token.
Observer = Callable[[int, np.ndarray[Any, Any], int], None]


def decode(
    target: Session,
    proposer: Proposer | None,
    prompt: list[int],
    chooser: Chooser,
    limits: Limits,
    statistics: Statistics,
    observe: Observer | None = None,
    pace: RequestPace | None = None,
    reused: int = 0,
) -> Iterator[Token]:
    """Yield the tokens that follow `prompt`, one by one; the last one carries the finish reason.

    The prompt must be shorter than the target's capacity. A token in `stop_token_ids` is emitted and ends the
    generation; nothing after it is, even if the same round accepted more. `pace` decides how far each round guesses, up
    to the limits' k, and what of it is verified; without it all go that far.
    `reused`: tokens of the prompt, not all, whose rows the target's cache holds.
    """
    tokens = list(prompt)
    remaining = min(limits.max_tokens, target.capacity - len(tokens))
    statistics.prompt_tokens = len(prompt)
    statistics.reused_tokens = reused
    target.truncate(reused)
    if proposer is not None:
        proposer.start(reused)
    for start in range(reused, len(tokens) - 1, limits.prefill_width):
        with statistics.timed("prefill"):
            output = feed(target, tokens[start : min(start + limits.prefill_width, len(tokens) - 1)], wanted=0)
        if proposer is not None:
            with statistics.timed("propose"):
                proposer.observe(output.hidden)
    while True:
        # The round itself adds a token, so guesses more than remaining - 1 positions ahead would be for nothing.
        began = time.perf_counter()
        limit = min(limits.k if pace is None else min(limits.k, pace.plan(len(tokens), remaining)), remaining - 1)
        with statistics.timed("propose"):
            guesses = proposer.propose(tokens, limit, chooser) if proposer and limit > 0 else EMPTY
            guesses = guesses.first(target.capacity - len(tokens))  # a tree may have more nodes than there is room
            proposal = guesses if pace is None else pace.settle(guesses)
        with statistics.timed("verify"):
            # The last committed token is node 0 of this call, so the proposal's nodes are one further on.
            output = target.grow([tokens[-1], *proposal.tokens], [ROOT, *(parent + 1 for parent in proposal.parents)])
        with statistics.timed("accept"):
            verdict = output.logits.accept(proposal, chooser, len(tokens))
        statistics.count_round(proposal.depths(), len(verdict.path), proposal.source)
        if pace is not None:
            pace.learn(guesses, proposal, verdict, time.perf_counter() - began)
        rows = [0, *(node + 1 for node in verdict.path)]
        for row, (token_id, origin) in zip(rows, _emitted(proposal, verdict), strict=True):
            if observe is not None:
                observe(len(tokens), output.logits.row(row), token_id)
            chooser.commit(token_id)
            tokens.append(token_id)
            remaining -= 1
            statistics.emitted += 1
            finish: FinishReason | None = "length" if remaining == 0 else None
            if token_id in limits.stop_token_ids:
                finish = "stop"
            yield Token(token_id, origin, finish)
            if finish is not None:
                return
        with statistics.timed("commit"):
            target.keep(rows)
        if proposer is not None:
            with statistics.timed("propose"):
                proposer.observe(None if output.hidden is None else _taken(output.hidden, rows))


def _taken(hidden: np.ndarray[Any, Any], rows: list[int]) -> np.ndarray[Any, Any]:
    """Without a copy where it can be: the states of a round are many numbers."""
    return hidden[: len(rows)] if rows[-1] == len(rows) - 1 else hidden[rows]


def _emitted(proposal: Proposal, verdict: Verdict) -> Iterator[tuple[int, Origin]]:
    for node in verdict.path:
        yield proposal.tokens[node], "drafted"
    if not proposal.tokens:
        yield verdict.next_token, "plain"
    else:
        last = verdict.path[-1] if verdict.path else ROOT
        yield verdict.next_token, "correction" if proposal.children(last) else "bonus"
