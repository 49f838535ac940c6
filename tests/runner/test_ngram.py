"""What n-gram lookup proposes."""

import random

import numpy as np
import pytest

from specrun.runner.pace import Reach
from specrun.runner.proposers.ngram import LONGEST, SHORTEST, TRUSTED_POSITIONS, NGramLookup
from specrun.runner.proposers.ngram_first import NGramFirst
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.types import Proposal

CHOOSER = Chooser(Sampling(seed=0))


def propose(tokens: list[int], limit: int = 4) -> tuple[int, ...]:
    lookup = NGramLookup()
    lookup.start()
    return lookup.propose(tokens, limit, CHOOSER).tokens


def test_copies_what_followed_the_suffix() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)


def test_longer_match_wins_over_a_later_one() -> None:
    assert propose([1, 2, 3, 70, 71, 9, 2, 3, 80, 81, 1, 2, 3]) == (70, 71, 9, 2)


def test_latest_of_equal_matches_wins() -> None:
    assert propose([1, 2, 50, 51, 1, 2, 60, 61, 1, 2], limit=2) == (60, 61)


@pytest.mark.parametrize("period", [1, 2, 3])
def test_repetition_is_continued_to_the_limit(period: int) -> None:
    pattern = list(range(period))
    tokens = pattern * 10
    assert propose(tokens, limit=8) == tuple((tokens * 2)[len(tokens) : len(tokens) + 8])


@pytest.mark.parametrize("size", range(SHORTEST, LONGEST + 2))
def test_a_longer_suffix_is_trusted_for_longer(size: int) -> None:
    suffix, rest = list(range(size)), list(range(100, 130))
    expected = TRUSTED_POSITIONS.get(size, 20)
    assert propose([*suffix, *rest, 99, *suffix], limit=20) == tuple(rest[:expected])


def test_nothing_without_a_match() -> None:
    assert propose([1, 2, 3, 4, 5]) == ()
    assert propose([1]) == ()
    assert propose([1, 2, 3, 9, 2], limit=3) == ()  # one token is no match


def slow_lookup(tokens: list[int], limit: int) -> tuple[int, ...]:
    for size in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                extended = list(tokens)
                for index in range(min(limit, TRUSTED_POSITIONS.get(size, limit))):
                    extended.append(extended[end + index])
                return tuple(extended[len(tokens) :])
    return ()


def test_growing_index_equals_a_search_from_scratch() -> None:
    rng = random.Random(0)
    lookup = NGramLookup()
    for _ in range(3):
        tokens = [rng.randrange(3) for _ in range(5)]
        lookup.start()
        for _ in range(60):
            assert lookup.propose(tokens, 4, CHOOSER).tokens == slow_lookup(tokens, 4)
            tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 6))]


class Draft:
    """Guesses sevens, as many as it may, and remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def start(self, reused: int = 0) -> None:
        self.told.append("start")

    def observe(self, hidden: object) -> None:
        self.told.append(hidden)

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        return Proposal.chain([7] * limit)


def test_another_draft_guesses_only_where_lookup_finds_nothing() -> None:
    draft = Draft()
    proposer = NGramFirst(draft, lambda: Reach(10, 3), NGramLookup())
    proposer.start()
    hidden = np.zeros((1, 4), np.float32)
    proposer.observe(hidden)
    assert draft.told == ["start", hidden]
    assert proposer.propose([1, 2, 3, 4, 5], 10, CHOOSER).tokens == (7, 7, 7)
    assert proposer.propose([1, 2, 3, 4, 5], 2, CHOOSER).tokens == (7, 7)
    tokens = [1, 2, 3, 4, 5, 6, 8, 9, 9, 1, 2, 3, 4, 5]
    assert proposer.propose(tokens, 5, CHOOSER).tokens == (6, 8, 9, 9, 1)
