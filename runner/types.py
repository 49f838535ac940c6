"""The words of a round, as data."""

from dataclasses import dataclass
from typing import Literal

Origin = Literal["plain", "drafted", "correction", "bonus"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens, a chain: each is the guess for the position after the one before."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """What the target makes of a proposal: how many of its tokens it accepts, and its own next token."""

    accepted: int
    next_token: int


@dataclass(frozen=True)
class Token:
    """A token of the output. `finish_reason` is set on the last one."""

    id: int
    origin: Origin
    finish_reason: FinishReason | None


EMPTY = Proposal(())
