"""Growing proposals: which nodes are proposed, whatever the draft."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.runner.draft_tree import CHAIN, TreeShape, grow_tree
from specrun.runner.logits import HostLogits
from specrun.runner.proposers.medusa import Medusa
from specrun.runner.sampling import Chooser, Sampling
from specrun.runner.types import ROOT, Proposal

Array = np.ndarray[Any, Any]
WORDS = 6


class RandomDraft:
    """Logits depend on the path alone."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._paths: list[tuple[int, ...]] = []
        self.calls = 0

    def logits(self, path: tuple[int, ...]) -> Array:
        rng = np.random.default_rng([self._seed, *path])
        return 2 * rng.standard_normal(WORDS).astype(np.float32)

    def feed(self, tokens: Sequence[int], parents: Sequence[int]) -> HostLogits:
        self.calls += 1
        first = len(self._paths)
        for token, parent in zip(tokens, parents, strict=True):
            self._paths.append((*(() if parent == ROOT else self._paths[parent]), token))
        return HostLogits(np.stack([self.logits(path) for path in self._paths[first:]]))

    def share(self, path: tuple[int, ...]) -> float:
        """The product of the shares along `path`."""
        total = 1.0
        for index, token in enumerate(path):
            weights = np.exp(self.logits(path[:index]))
            total *= float(weights[token] / weights.sum())
        return total


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return set(found)


def grow(draft: RandomDraft, shape: TreeShape, depth: int) -> set[tuple[int, ...]]:
    start = HostLogits(draft.logits(())[None])
    return paths(grow_tree(start, draft.feed, Chooser(Sampling(seed=0)), 7, shape, depth))


@pytest.mark.parametrize("seed", range(5))
def test_a_broad_tree_is_the_most_likely_paths(seed: int) -> None:
    every = [path for length in (1, 2, 3) for path in itertools.product(range(WORDS), repeat=length)]
    draft = RandomDraft(seed)
    every.sort(key=draft.share, reverse=True)
    assert grow(draft, TreeShape(breadth=WORDS**2, nodes=15), 3) == set(every[:15])


@pytest.mark.parametrize("p_min", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("shape", [CHAIN, TreeShape(2, 6), TreeShape(4, 40)], ids=["chain", "small", "large"])
@pytest.mark.parametrize("seed", range(5))
def test_unlikely_paths_are_not_proposed(seed: int, shape: TreeShape, p_min: float) -> None:
    draft, careful = RandomDraft(seed), RandomDraft(seed)
    everything = grow(draft, shape, 5)
    likely = grow(careful, TreeShape(shape.breadth, shape.nodes, p_min), 5)
    assert likely == {path for path in everything if draft.share(path) >= p_min}
    assert careful.calls <= draft.calls


def test_nothing_is_proposed_by_a_draft_that_is_never_sure() -> None:
    draft = RandomDraft(0)
    assert grow(draft, TreeShape(4, 12, p_min=0.99), 5) == set()
    assert draft.calls == 0


@pytest.mark.parametrize("p_min", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_unlikely_combinations_of_heads_are_not_proposed(seed: int, p_min: float) -> None:
    logits = 2 * np.random.default_rng(seed).standard_normal((3, WORDS)).astype(np.float32)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    every = [path for length in (1, 2, 3) for path in itertools.product(range(WORDS), repeat=length)]
    share = {path: np.prod([shares[depth, token] for depth, token in enumerate(path)]) for path in every}
    medusa = Medusa(lambda hidden: HostLogits(logits), TreeShape(WORDS, 14, p_min))
    medusa.start()
    medusa.observe(np.zeros((1, 4), np.float32))
    proposed = paths(medusa.propose([1, 2], 3, Chooser(Sampling(seed=0))))
    likely = [path for path in sorted(every, key=lambda path: -share[path])[:14] if share[path] >= p_min]
    assert proposed == set(likely)
