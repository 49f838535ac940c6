"""How often a draft guesses what its target chooses, on texts, without generating; for what quantization changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specrun.engines import ort
from specrun.engines.backend import FUSE, MODEL
from specrun.engines.manifest import MEDUSA, VOCABULARY_FILE, HeadEntry, ModelEntry
from specrun.engines.signature import HIDDEN_STATES, LOGITS, Signature
from specrun.engines.whole_text import WholeTextModel

Array = np.ndarray[Any, Any]

# (text, the target's states [tokens, taps * hidden] where it has taps) -> the draft's guesses for the last positions
Guess = Callable[[Sequence[int], Array | None], Array]


@dataclass(frozen=True)
class Reading:
    """What a target makes of texts."""

    texts: Sequence[Sequence[int]]
    choices: list[Array]  # greedy, after each token
    states: list[Array | None]  # [tokens, taps * hidden]

    @classmethod
    def of(cls, engine: Path, signature: Signature, texts: Sequence[Sequence[int]], vocabulary_size: int) -> "Reading":
        model = WholeTextModel(engine, signature)
        outputs = {LOGITS: signature.vocab_size}
        if signature.taps:
            outputs[HIDDEN_STATES] = len(signature.taps) * signature.hidden_size
        read = [model.read(text, outputs) for text in texts]
        choices = [values[LOGITS][:, :vocabulary_size].argmax(-1) for values in read]
        return cls(texts, choices, [values.get(HIDDEN_STATES) for values in read])

    def agreement(self, guess: Guess) -> float:
        """The share of a draft's first guesses that are the target's choices."""
        hits = []
        for text, choices, states in zip(self.texts, self.choices, self.states, strict=True):
            guesses = guess(text, states)
            hits.append(guesses == choices[len(choices) - len(guesses) :])
        return float(np.concatenate(hits).mean())


def tokens_per_round(agreement: float, k: int) -> float:
    """Of a chain of `k` guesses, if each were as good as the first: what is accepted, and one."""
    return sum(agreement**position for position in range(k + 1))


def guess_of_model(engine: Path, signature: Signature, vocabulary_size: int) -> Guess:
    """Of a draft model, or an early exit. `vocabulary_size`: ids beyond it are never guessed."""
    model = WholeTextModel(engine, signature)
    return lambda text, states: np.asarray(model.logits(text)[:, :vocabulary_size].argmax(-1))


def guess_of_head(kind: str, directory: Path, entry: HeadEntry, target: ModelEntry) -> Guess:
    """Of a head whose engines lie in `directory`, compiled for ONNX Runtime; its vocabulary, too. `target`: with its
    taps."""
    taps, width = list(target.signature.taps), target.signature.hidden_size
    columns = np.concatenate([np.arange(width) + width * taps.index(tap) for tap in entry.taps])
    ids = np.load(directory / VOCABULARY_FILE, allow_pickle=False) if entry.reduced_vocabulary else None
    size = target.vocabulary_size if ids is None else len(ids)
    engine, fuse = directory / f"{MODEL}.onnx", directory / f"{FUSE}.onnx"
    if kind == MEDUSA:
        heads = _stateless(engine)

        def logits_of(text: Sequence[int], states: Array) -> Array:
            return heads(states)[:, 0]

    else:
        assert entry.signature is not None
        model = WholeTextModel(engine, entry.signature)
        fused = _stateless(fuse) if fuse.is_file() else np.copy
        outputs = {LOGITS: entry.signature.vocab_size}

        def logits_of(text: Sequence[int], states: Array) -> Array:
            return model.read(text[1:], outputs, fused(states))[LOGITS]

    def guess(text: Sequence[int], states: Array | None) -> Array:
        assert states is not None
        # A head knows the token after a state, and guesses the one after that.
        best = logits_of(text, np.ascontiguousarray(states[:-1, columns]))[:, :size].argmax(-1)
        return np.asarray(best if ids is None else ids[best])

    return guess


def _stateless(engine: Path) -> Callable[[Array], Array]:
    session = ort.load_engine(engine)
    return lambda states: np.asarray(session.run(None, {HIDDEN_STATES: states[None]})[0][0])
