"""Grow a proposal from a draft's logits, level by level: a chain, or a dynamic tree.

The tree is EAGLE-2's (Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024): the
most likely nodes of each level are expanded, and of all nodes the most likely ones are proposed. Likely means the
product of the draft's shares along the path, under the noise of each position, so that one accept rule judges chains
and trees at every temperature.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specrun.runner.logits import Logits, Place
from specrun.runner.sampling import Chooser
from specrun.runner.types import ROOT, Proposal

Array = np.ndarray[Any, Any]

# Feeds nodes to the draft: tokens, and parents as in `Proposal` among the nodes fed so far. Returns their logits.
Feed = Callable[[Sequence[int], Sequence[int]], Logits]


@dataclass(frozen=True)
class TreeShape:
    """How a proposal may branch."""

    breadth: int  # nodes that are expanded on each level, and children that each gets
    nodes: int | None  # in all; None: no limit besides the depth's
    p_min: float = 0.0  # a path that the draft finds less likely costs more to verify than it is worth

    @classmethod
    def of(cls, nodes: int) -> "TreeShape":
        """A tree about as broad as deep (EAGLE-2's own shape, 10 of 60 nodes, is not far from it)."""
        return cls(1 + math.isqrt(nodes - 1), nodes)

    @property
    def least_score(self) -> float:
        """The logarithm of `p_min`."""
        return math.log(self.p_min) if self.p_min else -math.inf


CHAIN = TreeShape(breadth=1, nodes=None)


def grow_tree(logits: Logits, feed: Feed, chooser: Chooser, position: int, shape: TreeShape, depth: int) -> Proposal:
    """The proposal that starts at the last row of `logits`, which is for `position`; at most `depth` positions deep."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    probs: list[Array | None] = []
    fed: dict[int, int] = {ROOT: ROOT}  # number of each node among those fed to the draft
    level, first_row = [ROOT], len(logits) - 1
    for reached in range(depth):
        new: list[int] = []
        paths = [_path(tokens, parents, node) for node in level]
        places = [Place(row, position + len(path), path) for row, path in enumerate(paths, start=first_row)]
        for node, guesses in zip(level, logits.guess(places, chooser, shape.breadth), strict=True):
            above = 0.0 if node == ROOT else scores[node]
            for token, share in zip(guesses.tokens, guesses.shares, strict=True):
                new.append(len(tokens))
                tokens.append(int(token))
                parents.append(node)
                scores.append(above + float(share))
                probs.append(guesses.probs)
        level = sorted(new, key=lambda node: -scores[node])[: shape.breadth]
        if reached == depth - 1 or not level or _hopeless(scores[level[0]], scores, shape):
            break
        first = len(fed) - 1
        logits = feed([tokens[node] for node in level], [fed[parents[node]] for node in level])
        first_row = 0
        fed |= {node: first + index for index, node in enumerate(level)}
    return _best_nodes(tokens, parents, scores, probs, shape)


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens from the root's child to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _hopeless(score: float, scores: list[float], shape: TreeShape) -> bool:
    """No descendant of a node with `score` will be proposed."""
    full = shape.nodes is not None and len(scores) > shape.nodes
    return score < shape.least_score or (full and sorted(scores, reverse=True)[(shape.nodes or 0) - 1] > score)


def _best_nodes(
    tokens: list[int], parents: list[int], scores: list[float], probs: list[Array | None], shape: TreeShape
) -> Proposal:
    """The proposal that the likely nodes make. A parent is at least as likely as its children and comes before them,
    so it is never left out. `probs`: as in `Guesses`."""
    likely = [node for node, score in enumerate(scores) if score >= shape.least_score]
    order = sorted(sorted(likely, key=lambda node: -scores[node])[: shape.nodes])
    number = {ROOT: ROOT, **{node: index for index, node in enumerate(order)}}
    drawn_from = tuple(found for node in order if (found := probs[node]) is not None)
    return Proposal(
        tuple(tokens[node] for node in order), tuple(number[parents[node]] for node in order), drawn_from or None
    )
