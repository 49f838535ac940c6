"""Logits processors: what a request changes in the model's logits before a token is chosen.

In this order: logit bias, repetition penalty (CTRL, arXiv 1909.05858), frequency and presence penalty (OpenAI's),
masks. Each row of a verification sees the tokens that lead to it; what is remembered are emitted tokens only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrun.engines.errors import RequestError
from specrun.runner.grammar import Grammar, GrammarState

Array = np.ndarray[Any, Any]

MAX_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True)
class Processing:
    """What a request asks for; the defaults change nothing."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the token's logit
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen in prompt or output, multiplies negative
    frequency_penalty: float = 0.0  # subtracted once for each time a token was emitted
    presence_penalty: float = 0.0  # subtracted once for a token that was emitted at all
    min_tokens: int = 0  # emitted before a stop token may be
    allowed_token_ids: frozenset[int] | None = None  # None: all
    forbidden_token_ids: frozenset[int] = frozenset()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for token, bias in self.logit_bias.items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError(f"got a bias of {bias} for token {token}, expected {-MAX_BIAS:g} to {MAX_BIAS:g}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise RequestError(
                    f"got {name} {getattr(self, name)}, expected {-MAX_PENALTY:g} to {MAX_PENALTY:g} (0: off)"
                )
        if not 0.01 <= self.repetition_penalty <= 100:
            raise RequestError(f"got repetition_penalty {self.repetition_penalty}, expected 0.01 to 100 (1: off)")
        if self.min_tokens < 0:
            raise RequestError(f"got min_tokens {self.min_tokens}, expected 0 (off) or more")
        if self.allowed_token_ids is not None and not self.allowed_token_ids - self.forbidden_token_ids:
            raise RequestError("got no token id that is allowed and not forbidden, expected at least one")

    @property
    def changes_nothing(self) -> bool:
        return self == Processing()

    def require_ids(self, vocabulary_size: int) -> None:
        """Raises RequestError if a token id is outside the vocabulary."""
        ids = {*self.logit_bias, *(self.allowed_token_ids or ()), *self.forbidden_token_ids}
        strange = sorted(token for token in ids if not 0 <= token < vocabulary_size)
        if strange:
            raise RequestError(f"got token id {strange[0]}, expected 0 to {vocabulary_size - 1}")


class Processor:
    """The processors of one request, and what they remember: how often each token was emitted, and the grammar."""

    def __init__(
        self,
        processing: Processing,
        prompt: Sequence[int],
        vocabulary_size: int,
        stop_token_ids: frozenset[int],
        grammar: GrammarState | None,
    ) -> None:
        self.processing = processing
        self._grammar = grammar
        self._emitted = 0
        self._bias = np.zeros(vocabulary_size, np.float32)
        self._bias[list(processing.logit_bias)] = list(processing.logit_bias.values())
        self._counts = np.zeros(vocabulary_size, np.float32)  # of emitted tokens
        self._seen = np.zeros(vocabulary_size, bool)  # in prompt or output
        self._seen[[token for token in prompt if token < vocabulary_size]] = True
        self._penalizes = processing.repetition_penalty != 1 or bool(
            processing.frequency_penalty or processing.presence_penalty
        )
        self._edited = np.array(sorted(processing.logit_bias), np.int64)
        if processing.repetition_penalty != 1:
            self._edited = np.union1d(self._edited, np.flatnonzero(self._seen))
        self._stop = _members(stop_token_ids, vocabulary_size)
        allowed = processing.allowed_token_ids
        self._allowed = np.ones(vocabulary_size, bool) if allowed is None else _members(allowed, vocabulary_size)
        self._allowed &= ~_members(processing.forbidden_token_ids, vocabulary_size)
        self._masks = not self._allowed.all()

    def process(self, logits: Array, path: Sequence[int] | None, ids: Array | None = None) -> Array:
        """A processed copy of `logits` float32 [columns].

        `path`: the tokens after the committed ones; None if they are not known, then the grammar is left out. `ids`:
        the token of each column, ascending; by default the first ones of the vocabulary. Raises GrammarError.
        """
        row = logits.copy()
        self._edit(row, path or (), ids)
        allowed = self.allowed(path)
        if allowed is not None:
            row[~(allowed[: len(row)] if ids is None else allowed[ids])] = -np.inf
        return row

    def allowed(self, path: Sequence[int] | None) -> Array | None:
        """Which tokens may follow `path`: bool [vocabulary]; None if all may."""
        early = self._emitted + len(path or ()) < self.processing.min_tokens
        grammar = None if self._grammar is None or path is None else self._grammar.allowed(path)
        if not early and grammar is None:
            return self._allowed if self._masks else None
        allowed = self._allowed if grammar is None else self._allowed & grammar
        # Where a grammar is complete, nothing but a stop token is left.
        return allowed & ~self._stop if early and (allowed & ~self._stop).any() else allowed

    def may_continue(self, path: Sequence[int] | None) -> bool:
        """Whether a draft may guess what follows `path`: not where the grammar is complete."""
        if self._grammar is None or path is None:
            return True
        return bool((self._grammar.allowed(path) & ~self._stop).any())

    def edits(self, path: Sequence[int], others: Sequence[int] = ()) -> tuple[Array, Array, Array, Array]:
        """Tokens whose logits differ from the model's after `path`, ascending, and any of `others`: ids, biases, how
        often each was emitted, whether it was seen. What the kernels read (`engines/accept.cu`)."""
        if not self._penalizes:
            return self._edited, self._bias[self._edited], self._counts[self._edited], self._seen[self._edited]
        # A lookup may copy padding ids.
        known = [token for token in (*path, *others) if token < len(self._bias)]
        ids = np.union1d(self._edited, np.array(known, np.int64))
        counts, seen = self._counts[ids], self._seen[ids]
        for token in path:
            same = ids == token
            counts[same] += 1
            seen |= same
        return ids, self._bias[ids], counts, seen

    def commit(self, token: int) -> None:
        """`token` was emitted. Raises GrammarError."""
        self._emitted += 1
        if self._grammar is not None:
            self._grammar.commit(token)
        if self._penalizes:
            if not self._counts[token]:
                self._edited = np.union1d(self._edited, [token])
            self._counts[token] += 1
            self._seen[token] = True

    def _edit(self, row: Array, path: Sequence[int], ids: Array | None) -> None:
        tokens, bias, counts, seen = self.edits(path)
        if not len(tokens):
            return
        if ids is None:
            there = tokens < len(row)
            columns = tokens[there]
        else:
            columns = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
            there = ids[columns] == tokens
            columns = columns[there]
        row[columns] = self.penalize(row[columns], bias[there], counts[there], seen[there])

    def penalize(self, values: Array, bias: Array, counts: Array, seen: Array) -> Array:
        """float32, in this order of operations."""
        repetition = np.float32(self.processing.repetition_penalty)
        values = values + bias
        penalized = np.where(values > 0, values / repetition, values * repetition)
        values = np.where(seen, penalized, values)
        values = values - np.float32(self.processing.frequency_penalty) * counts
        return np.asarray(values - np.float32(self.processing.presence_penalty) * (counts > 0).astype(np.float32))


def _members(token_ids: frozenset[int], vocabulary_size: int) -> Array:
    members = np.zeros(vocabulary_size, bool)
    members[sorted(token_ids)] = True
    return members
