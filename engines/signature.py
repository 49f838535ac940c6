"""The graph contract: tensor names and axes of an exported model. Their only home.

`export` writes graphs with these names, the engine backends and the runner bind them. Everything about a
graph's inputs and outputs follows from the four numbers in `Signature`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

OPSET = 24

INPUT_IDS = "input_ids"  # int64 [batch, tokens]
POSITION_IDS = "position_ids"  # int64 [batch, tokens]: cache_length + depth in the tree
CACHE_LENGTH = "cache_length"  # int64 [batch]: committed tokens, and where new rows are written
TREE_MASK = "tree_mask"  # bool [batch, tokens, tokens]: row i may attend to column j of this call
LOGITS = "logits"  # [batch, tokens, vocab]

BATCH, TOKENS, CAPACITY = "batch", "tokens", "capacity"

CONTROL_AXES: dict[str, tuple[str, ...]] = {
    INPUT_IDS: (BATCH, TOKENS),
    POSITION_IDS: (BATCH, TOKENS),
    CACHE_LENGTH: (BATCH,),
    TREE_MASK: (BATCH, TOKENS, TOKENS),
}

Shape = tuple[str | int, ...]


def past(layer: int, part: str) -> str:
    """Name of a cache input; `part` is "key" or "value"."""
    return f"past_key_values.{layer}.{part}"


def present(layer: int, part: str) -> str:
    """Name of the cache output that is bound to the same buffer as `past(layer, part)`."""
    return f"present.{layer}.{part}"


@dataclass(frozen=True)
class Signature:
    """What fixes the inputs and outputs of one graph."""

    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # columns of the logits; a padded vocabulary counts its padding

    def cache_parts(self) -> Iterator[tuple[int, str]]:
        """(layer, "key" | "value") in the order of the graph's inputs."""
        for layer in range(self.num_layers):
            yield layer, "key"
            yield layer, "value"

    def cache_shape(self) -> Shape:
        return (BATCH, self.kv_heads, CAPACITY, self.head_dim)

    def inputs(self) -> dict[str, Shape]:
        """Input names and shapes in order; named axes as strings."""
        caches = {past(layer, part): self.cache_shape() for layer, part in self.cache_parts()}
        return {**CONTROL_AXES, **caches}

    def outputs(self) -> dict[str, Shape]:
        """Output names and shapes in order; named axes as strings."""
        caches = {present(layer, part): self.cache_shape() for layer, part in self.cache_parts()}
        return {LOGITS: (BATCH, TOKENS, self.vocab_size), **caches}
