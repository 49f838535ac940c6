"""Collect the target's answers to prompts, shard after shard; an interrupted run goes on where it stopped."""

import hashlib
import logging
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from safetensors import safe_open

from specrun.distill.answers import Answerer
from specrun.distill.corpus import shard_key, write_shard
from specrun.distill.teacher import Teacher
from specrun.engines.errors import SpecrunError
from specrun.runner.sampling import Chooser, Sampling

logger = logging.getLogger(__name__)

PROMPTS_PER_SHARD = 512
BATCH = 48
MAX_PROMPT, MAX_ANSWER = 256, 160  # tokens
# A draft meets the target at every temperature: three answers in five are greedy, the others sampled.
GREEDY_OF_FIVE, TEMPERATURE = 3, 0.8


class CollectionError(SpecrunError):
    """The prompts give no corpus."""


def collect(teacher: Teacher, prompts: Iterable[str], tokens: int, directory: Path) -> list[Path]:
    """Shards that hold at least `tokens` tokens written by the target, or all that `prompts` give.

    What is in `directory` already, answers to the same prompts, is kept. Raises CollectionError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = teacher.tokenizer()
    answerer: Answerer | None = None
    shards: list[Path] = []
    written = 0
    prompts, drawn = iter(prompts), 0
    while written < tokens and (part := list(islice(prompts, PROMPTS_PER_SHARD))):
        shard = directory / f"shard-{drawn // PROMPTS_PER_SHARD:04}.safetensors"
        start, drawn = drawn, drawn + len(part)
        key = hashlib.sha256("\n".join([teacher.fingerprint, *part]).encode()).hexdigest()
        if not (shard.is_file() and shard_key(shard) == key):
            ids = [teacher.encode(tokenizer, prompt) for prompt in part]
            ids = [prompt for prompt in ids if 2 <= len(prompt) <= MAX_PROMPT]
            if not ids:
                continue
            stop = frozenset(teacher.model.stop_token_ids)
            answerer = answerer or Answerer(teacher.directory, teacher.model, BATCH, MAX_ANSWER, stop)
            choosers = [Chooser(_sampling(start + index)) for index in range(len(ids))]
            began = time.monotonic()
            answers = answerer.answer(ids, choosers)
            write_shard(shard, answers, key)
            new = sum(len(answer.tokens) - answer.prompt_length for answer in answers)
            rate = new / (time.monotonic() - began)
            logger.info(
                "%d of %d tokens, %.0f tokens/s, about %.0f minutes left",
                written + new,
                tokens,
                rate,
                max(0, tokens - written - new) / rate / 60,
            )
        shards.append(shard)
        written += answer_tokens(shard)
    if not shards:
        raise CollectionError(f"none of the {drawn} prompts has 2 to {MAX_PROMPT} tokens")
    if written < tokens:
        logger.warning(
            "the prompts gave %d tokens, %d were asked for: give more --data for a better draft", written, tokens
        )
    return shards


def answer_tokens(shard: Path) -> int:
    with safe_open(shard, "numpy") as file:
        return int(file.get_tensor("lengths").sum() - file.get_tensor("prompt_lengths").sum())


def _sampling(index: int) -> Sampling:
    return Sampling(temperature=0.0 if index % 5 < GREEDY_OF_FIVE else TEMPERATURE, seed=index)
