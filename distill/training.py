"""The training loop: transformers' Trainer, which brings schedule, checkpoints, resumption and progress.

Tried beside it, on a machine without a GPU: nvidia-modelopt 0.47 trains EAGLE heads from stored states but wants
transformers below 5.15, and its Medusa runs the target in every step; speculators 0.9 has no Medusa, wants transformers
up to 5.19, and its trainer needs an accelerator. Neither has both methods, so both use the loop of a library that is
needed anyway; the losses (eagle3.py, medusa.py) follow the papers.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import get_last_checkpoint

from specrun.distill.corpus import Corpus, collate

logger = logging.getLogger(__name__)

SAVE_EVERY = 200  # steps
VALIDATION_BATCH = 8


@dataclass(frozen=True)
class TrainingOptions:
    epochs: float = 3.0
    batch: int = 6  # conversations
    learning_rate: float = 8e-4
    seed: int = 0


@dataclass(frozen=True)
class Acceptance:
    """How often each drafted position was right where all before it were, on conversations kept from training."""

    per_position: tuple[float, ...]
    conversations: int

    @property
    def chain_length(self) -> float:
        """Tokens per round that a chain of that many positions would give: 1 + the mean number accepted."""
        length, reached = 1.0, 1.0
        for share in self.per_position:
            reached *= share
            length += reached
        return length

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.per_position)
        return f"acceptance per position {shares}; {self.chain_length:.2f} tokens per round as a chain"


def train(
    trainee: torch.nn.Module, training: Corpus, validation: Corpus, directory: Path, options: TrainingOptions
) -> tuple[int, Acceptance]:
    """Train in place, going on from the last checkpoint in `directory` if there is one. Returns the number of steps
    and what the result guesses."""
    arguments = TrainingArguments(
        output_dir=str(directory),
        use_cpu=not torch.cuda.is_available(),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        max_grad_norm=0.5,
        adam_beta2=0.95,
        weight_decay=0.01,
        save_steps=SAVE_EVERY,
        save_total_limit=2,
        logging_steps=50,
        seed=options.seed,
        remove_unused_columns=False,
        report_to=[],
    )
    trainer = _LengthGrouped(
        model=trainee,
        args=arguments,
        train_dataset=training,
        data_collator=collate,
        callbacks=[_Validate(validation)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(directory)) if directory.is_dir() else None)
    return trainer.state.global_step, measure(trainee, validation)


@torch.no_grad()
def measure(trainee: torch.nn.Module, validation: Corpus) -> Acceptance:
    """Acceptance per position on `validation`."""
    trainee.eval()
    hits, tries = torch.zeros(()), torch.zeros(())
    for start in range(0, len(validation), VALIDATION_BATCH):
        members = range(start, min(start + VALIDATION_BATCH, len(validation)))
        result = trainee(**collate([validation[index] for index in members]))
        hits, tries = hits + result["hits"], tries + result["tries"]
    return Acceptance(tuple((hits / tries.clamp(min=1)).tolist()), len(validation))


class _LengthGrouped(Trainer):  # type: ignore[misc] # transformers publishes no types
    """Conversations of like length go into one batch, so that little is padding."""

    def _get_train_sampler(self, train_dataset: Corpus | None = None) -> torch.utils.data.Sampler[int]:
        corpus = train_dataset or self.train_dataset
        sampler: torch.utils.data.Sampler[int] = LengthGroupedSampler(
            self.args.train_batch_size, dataset=corpus, lengths=corpus.lengths()
        )
        return sampler


class _Validate(TrainerCallback):  # type: ignore[misc] # transformers publishes no types
    def __init__(self, validation: Corpus) -> None:
        self._validation = validation

    def on_save(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        acceptance = measure(model, self._validation)
        model.train()
        logger.info("step %d of %d: %s", state.global_step, state.max_steps, acceptance)
