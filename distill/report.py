"""The card of a trained draft: what it was trained on, for how long, and how well it guesses."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.distill.training import Acceptance

if TYPE_CHECKING:
    from specrun.distill.distill import DistillOptions
    from specrun.distill.method import Student

CARD_FILE = "README.md"
CARD = """# {method} draft for {model}

Trained by `specrun distill` on the target's own answers; usable with `specrun build {model} --draft` and this folder.

| | |
|---|---|
| parameters trained | {parameters:,} |
| prompts | {prompts:,}, in turn from {data}; self: written by the target |
| answers | {tokens:,} tokens, {answers:,} answers to train on; 3 of 5 greedy, others at temperature 0.8 |
| draft vocabulary | {vocabulary:,} tokens, {covered:.1%} of what the target wrote |
| training | {epochs:g} epochs, batches of {batch} conversations, learning rate {rate:g}; {steps:,} steps |
| started from | {start} |

Acceptance on {conversations} conversations that were kept from training (greedy guess of the draft against the
token that the target wrote, sampled ones included; each position given that all before it were right):

| position | {positions} |
|---|{rules}|
| accepted | {shares} |

As a chain of that length: {length:.2f} tokens per round.
"""


def write_card(
    directory: Path,
    options: "DistillOptions",
    student: "Student",
    steps: int,
    acceptance: Acceptance,
    prompts: int,
    answers: int,
    tokens: int,
    vocabulary: int,
    covered: float,
) -> None:
    """Write README.md into `directory`."""
    trained = sum(value.numel() for value in student.trainee.parameters() if value.requires_grad)
    shares = acceptance.per_position
    card = CARD.format(
        method=options.method,
        model=options.model,
        parameters=trained,
        prompts=prompts,
        data=", ".join(f"{Path(source).name} ({times}x)" for source, times in Counter(options.data).items()),
        answers=answers,
        tokens=tokens,
        vocabulary=vocabulary,
        covered=covered,
        start=options.start.name if options.start else "the target's own layer and head",
        epochs=options.training.epochs,
        batch=options.training.batch,
        rate=options.training.learning_rate,
        steps=steps,
        conversations=acceptance.conversations,
        positions=" | ".join(str(position + 1) for position in range(len(shares))),
        rules="|".join("---" for _ in shares),
        shares=" | ".join(f"{share:.1%}" for share in shares),
        length=acceptance.chain_length,
    )
    if options.start is not None and (earlier := options.start / CARD_FILE).is_file():
        _, _, text = earlier.read_text(encoding="utf-8").partition("\n")
        card += f"\n## {options.start.name}, from which it started\n{text}"
    (directory / CARD_FILE).write_text(card, encoding="utf-8")
