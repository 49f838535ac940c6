"""Which rows of a call see each other: the ancestors of every node."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrun.runner.types import ROOT

Array = np.ndarray[Any, Any]


ONE_DEPTH, ONE_NODE = np.zeros(1, np.int64), np.ones((1, 1), bool)  # of plain decoding


def padded_mask(mask: Array, before: int, width: int, columns: int) -> Array:
    """The mask of a call of `width` rows of which only the first count: bool [width, columns].

    `mask` [tokens, nodes]: as `Ancestry.add` gives it; `before`: how many of the nodes were there before. Columns
    in front of the first node are committed tokens, visible to all; a row of padding sees itself alone, and nobody sees
    it.
    """
    count, nodes = mask.shape
    if count == width == 1 and not before:
        return np.ones((1, columns), bool)
    first = columns - width - before  # column of the first node
    whole = np.zeros((width, columns), bool)
    whole[:count, :first] = True
    whole[:count, first : first + nodes] = mask
    padding = np.arange(count, width)
    whole[padding, columns - width + padding] = True
    return whole


class Ancestry:
    """The nodes fed since the committed tokens, each with what it may attend to.

    As in `Proposal`, a parent is an earlier node, or ROOT for the committed tokens.
    """

    def __init__(self) -> None:
        self._lines: list[list[int]] = []  # of each node: itself and its ancestors

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, parents: Sequence[int]) -> tuple[Array, Array]:
        """Add nodes. Returns the depth of each below the committed tokens, from 0, int64 [new], and the mask
        bool [new, nodes in all] that says what each may attend to."""
        first = len(self._lines)
        for parent in parents:
            self._lines.append([*([] if parent == ROOT else self._lines[parent]), len(self._lines)])
        if len(self._lines) == 1:
            return ONE_DEPTH, ONE_NODE
        new = self._lines[first:]
        mask = np.zeros((len(new), len(self._lines)), bool)
        mask[[row for row, line in enumerate(new) for _ in line], [node for line in new for node in line]] = True
        return np.array([len(line) - 1 for line in new], np.int64), mask

    def clear(self) -> None:
        self._lines.clear()
