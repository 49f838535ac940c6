"""Train a draft for a target: prompts, the target's answers, training, checkpoint, card."""

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specrun.distill.collection import MAX_ANSWER, MAX_PROMPT, answer_tokens, collect
from specrun.distill.corpus import Corpus, coverage, frequent_tokens, shard_key
from specrun.distill.method import METHODS, Student, load_start
from specrun.distill.prompts import make_prompts
from specrun.distill.report import write_card
from specrun.distill.self_prompts import SELF, self_prompts
from specrun.distill.teacher import Teacher
from specrun.distill.training import TrainingOptions, train
from specrun.engines.errors import SpecrunError
from specrun.engines.staging import staged_directory
from specrun.export.checkpoint import CONFIG_FILE, Checkpoint
from specrun.export.heads import HeadCheckpoint

logger = logging.getLogger(__name__)


class DistillError(SpecrunError):
    """A training request makes no sense."""


@dataclass(frozen=True)
class DistillOptions:
    """What a user asks of a training."""

    model: str
    method: str
    data: tuple[str, ...]
    out: Path
    work: Path  # what a run leaves for the next one: engine, answers, checkpoints of the training
    tokens: int = 1_000_000
    draft_vocabulary: int = 8192
    start: Path | None = None  # a trained draft to go on from
    training: TrainingOptions = field(default_factory=TrainingOptions)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise DistillError(f"got method {self.method!r}, expected one of {', '.join(METHODS)}")
        if not self.data:
            raise DistillError(f"got no --data; expected {SELF}, files of prompts or directories of text")
        if self.tokens < 1 or self.draft_vocabulary < 1 or self.training.epochs <= 0 or self.training.batch < 1:
            raise DistillError("expected at least one token, one vocabulary entry and one conversation a batch")


def distill(options: DistillOptions, downloads: Path) -> None:
    """Train, and write the checkpoint to `options.out`, atomically. Raises errors of this package and of `export`."""
    checkpoint = Checkpoint.open(options.model, downloads)
    teacher = Teacher.prepare(checkpoint, options.work / "teacher")
    start = load_start(options.start, options.method, teacher, checkpoint) if options.start else None
    own = options.work / f"prompts-{teacher.fingerprint[:12]}"
    sources = [self_prompts(teacher, own) if source == SELF else Path(source) for source in options.data]
    shards = collect(teacher, make_prompts(sources), options.tokens, options.work / "answers")

    longest = MAX_PROMPT + MAX_ANSWER
    training, validation = Corpus(shards, False, longest), Corpus(shards, True, longest)
    size = min(options.draft_vocabulary, teacher.model.vocabulary_size)
    ids = frequent_tokens(training, size, teacher.model.stop_token_ids)
    covered = coverage(training, ids)
    logger.info(
        "%d conversations to train on, %d to validate; the draft's %d tokens cover %.1f %% of what is written",
        len(training),
        len(validation),
        len(ids),
        100 * covered,
    )
    torch.manual_seed(options.training.seed)
    student: Student = METHODS[options.method](teacher, checkpoint, torch.from_numpy(ids), start)
    run = options.work / _run_name(options, shards)
    steps, acceptance = train(student.trainee, training, validation, run, options.training)
    logger.info("%s", acceptance)
    with staged_directory(options.out, CONFIG_FILE) as directory:
        student.write(directory)
        write_card(
            directory,
            options,
            student,
            steps,
            acceptance,
            prompts=len(training) + len(validation),
            answers=len(training),
            tokens=sum(map(answer_tokens, shards)),
            vocabulary=len(ids),
            covered=covered,
        )


def _run_name(options: DistillOptions, shards: list[Path]) -> str:
    """Of the directory with the training's checkpoints: another for other options or answers."""
    settings = repr((options.method, options.draft_vocabulary, options.training, [shard.name for shard in shards]))
    if options.start is not None and (start := HeadCheckpoint.recognize(options.start)) is not None:
        settings += start.fingerprint()
    settings += "".join(shard_key(shard) for shard in shards)
    return f"{options.method}-{hashlib.sha256(settings.encode()).hexdigest()[:12]}"
