"""The graph contract: tensor names and axes of an exported model. Their only home.

`export` writes graphs with these names, the engine backends and the runner bind them. Everything about a
graph's inputs and outputs follows from the numbers in `Signature`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

OPSET = 24

INPUT_IDS = "input_ids"  # int64 [batch, tokens]
POSITION_IDS = "position_ids"  # int64 [batch, tokens]: cache_length + depth in the tree
CACHE_LENGTH = "cache_length"  # int64 [batch]: committed tokens, and where new rows are written
TREE_MASK = "tree_mask"  # bool [batch, tokens, tree]: row i may attend to column j, see below
FEATURES = "features"  # [batch, tokens, hidden]: what an EAGLE head reads beside each token
HIDDEN_STATES = "hidden_states"  # [batch, tokens, taps * hidden]
LOGITS = "logits"  # [batch, tokens, vocab]
# int64 [batch, rows], of engines for ONNX Runtime's CPU provider only, no exported graph has it: the tokens of the call
# whose logits are wanted; `logits` is [batch, rows, vocab] then.
LOGIT_ROWS = "logit_rows"

# The columns of `tree_mask` are the last `tree` cache rows, those of this call at the end; tree >= tokens. Rows
# before them are visible to all. A verification has tree == tokens; a draft that grows a tree level by level
# masks the rows of the earlier levels too.
BATCH, TOKENS, TREE, CAPACITY, ROWS = "batch", "tokens", "tree", "capacity", "rows"

CONTROL_AXES: dict[str, tuple[str, ...]] = {
    INPUT_IDS: (BATCH, TOKENS),
    POSITION_IDS: (BATCH, TOKENS),
    CACHE_LENGTH: (BATCH,),
    TREE_MASK: (BATCH, TOKENS, TREE),
}

Shape = tuple[str | int, ...]


def state(index: int) -> str:
    """Name, inside an exported graph, of the hidden state that enters layer `index`; the number of layers stands
    for the state that leaves the last one. A build makes outputs and early exits from them."""
    return f"state.{index}"


NORMED_STATE = "state.normed"  # the same for what the language model head reads


def past(layer: int, part: str) -> str:
    """Name of a cache input; `part` is "key" or "value"."""
    return f"past_key_values.{layer}.{part}"


def present(layer: int, part: str) -> str:
    """Name of the cache output that is bound to the same buffer as `past(layer, part)`."""
    return f"present.{layer}.{part}"


@dataclass(frozen=True)
class Signature:
    """What fixes the inputs and outputs of one graph that has a KV cache."""

    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int  # columns of the logits; a padded vocabulary counts its padding
    hidden_size: int
    taps: tuple[int, ...] = ()  # hidden states put out: i enters layer i, num_layers is what the head reads
    skipped: tuple[int, ...] = ()  # layers that an early exit leaves out; it has no caches for them
    reads_features: bool = False  # an EAGLE head

    def cache_parts(self) -> Iterator[tuple[int, str]]:
        """(layer, "key" | "value") in the order of the graph's inputs."""
        for layer in range(self.num_layers):
            if layer not in self.skipped:
                yield layer, "key"
                yield layer, "value"

    def cache_shape(self) -> Shape:
        return (BATCH, self.kv_heads, CAPACITY, self.head_dim)

    def inputs(self) -> dict[str, Shape]:
        """Input names and shapes in order; named axes as strings."""
        features = {FEATURES: (BATCH, TOKENS, self.hidden_size)} if self.reads_features else {}
        caches = {past(layer, part): self.cache_shape() for layer, part in self.cache_parts()}
        return {**CONTROL_AXES, **features, **caches}

    def outputs(self) -> dict[str, Shape]:
        """Output names and shapes in order; named axes as strings."""
        hidden = {HIDDEN_STATES: (BATCH, TOKENS, len(self.taps) * self.hidden_size)} if self.taps else {}
        caches = {present(layer, part): self.cache_shape() for layer, part in self.cache_parts()}
        return {LOGITS: (BATCH, TOKENS, self.vocab_size), **hidden, **caches}
