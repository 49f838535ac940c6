"""What quantization costs: how often the choice stays the same, and the perplexity of held-out text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import Acceptance, Quality
from specrun.engines.signature import Signature
from specrun.engines.whole_text import WholeTextModel

# What a quantized model may lose. SmolLM2-135M with 8-bit weights stays far above, with 4-bit weights far below.
MAX_PERPLEXITY_CHANGE = 0.015
MIN_AGREEMENT = 0.92
MIN_ACCEPTANCE_CHANGE = -0.05  # of a draft's tokens per round


class QualityError(SpecrunError):
    """A quantized model lost more than it may."""


@dataclass
class _Sums:
    loss: float = 0.0
    tokens: int = 0


def measure(
    reference: Path,
    quantized: Path,
    signature: Signature,
    windows: Sequence[Sequence[int]],
    vocabulary_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Quality:
    """Compare two engines of one model on `windows` of token ids. `progress` gets the windows that are done."""
    models = [WholeTextModel(engine, signature) for engine in (reference, quantized)]
    sums = [_Sums(), _Sums()]
    same = choices = 0
    for done, window in enumerate(windows, start=1):
        rows = [model.logits(window)[:, :vocabulary_size].astype(np.float64) for model in models]
        same += int((rows[0].argmax(-1) == rows[1].argmax(-1)).sum())
        choices += len(window)
        for total, logits in zip(sums, rows, strict=True):
            top = logits.max(-1)
            normalizer = top + np.log(np.exp(logits - top[:, None]).sum(-1))
            total.loss += float((normalizer[:-1] - logits[np.arange(len(window) - 1), window[1:]]).sum())
            total.tokens += len(window) - 1
        progress(done)
    before, after = (float(np.exp(total.loss / total.tokens)) for total in sums)
    return Quality(tokens=choices, agreement=same / choices, reference_perplexity=before, perplexity=after)


def require_quality(quality: Quality, name: str, precision: str) -> None:
    """Raises QualityError if a model lost more than it may."""
    if quality.agreement >= MIN_AGREEMENT and quality.perplexity_change <= MAX_PERPLEXITY_CHANGE:
        return
    raise QualityError(
        f"{name} loses too much at {precision}: {describe(quality)}; expected at least {100 * MIN_AGREEMENT:g} % "
        f"and at most {100 * MAX_PERPLEXITY_CHANGE:+g} %. Choose another precision, or build it all the same with "
        f"--accept-quality-loss"
    )


def require_acceptance(acceptance: Acceptance, draft: str, precision: str) -> None:
    """Raises QualityError if a draft guesses worse than it may."""
    if acceptance.change >= MIN_ACCEPTANCE_CHANGE:
        return
    raise QualityError(
        f"at {precision} {draft} promises {acceptance.quantized:.2f} tokens per round instead of "
        f"{acceptance.reference:.2f}; expected at most {-100 * MIN_ACCEPTANCE_CHANGE:g} % less. Choose another "
        f"precision or draft, or build it all the same with --accept-quality-loss"
    )


def describe(quality: Quality) -> str:
    """The figures in words."""
    return (
        f"{100 * quality.agreement:.1f} % of its choices stay the same, perplexity "
        f"{quality.reference_perplexity:.2f} -> {quality.perplexity:.2f} ({100 * quality.perplexity_change:+.2f} %), "
        f"on {quality.tokens:,} held-out tokens"
    )
