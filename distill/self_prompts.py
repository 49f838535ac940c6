"""Prompts that the target writes itself: after the opening of a chat, a tuned model goes on with what a user might say.

Magpie (Xu et al. 2024, arXiv 2406.08464). Nothing is closer to what the model was tuned on, and no text is needed.
"""

import json
import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from specrun.distill.answers import Answerer
from specrun.distill.teacher import Teacher, TeacherError
from specrun.runner.sampling import Chooser, Sampling

logger = logging.getLogger(__name__)

SELF = "self"  # the name of this source
PROMPTS_PER_FILE = 512
BATCH = 48
SHORTEST, LONGEST = 4, 48  # tokens, the end of the turn included
TEMPERATURE, TOP_P = 1.0, 0.9  # varied, but without the tail in which a small model loses its thread


def self_prompts(teacher: Teacher, directory: Path) -> Iterator[str]:
    """Prompts without end, the same ones each time; what was written before is read from `directory`.

    Raises TeacherError if the target has no chat template, or writes nothing that could be a prompt.
    """
    tokenizer = teacher.tokenizer()
    opening, end = teacher.user_turn(tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    answerer: Answerer | None = None
    for number in count():
        file = directory / f"{number:04}.json"
        if not file.is_file():
            logger.info("the target writes %d prompts", PROMPTS_PER_FILE)
            answerer = answerer or Answerer(teacher.directory, teacher.model, BATCH, LONGEST, frozenset({end}))
            seeds = range(number * PROMPTS_PER_FILE, (number + 1) * PROMPTS_PER_FILE)
            choosers = [Chooser(Sampling(temperature=TEMPERATURE, top_p=TOP_P, seed=seed)) for seed in seeds]
            written = answerer.answer([opening] * len(choosers), choosers)
            turns = [answer.tokens[answer.prompt_length :] for answer in written]
            whole = [turn[:-1] for turn in turns if len(turn) >= SHORTEST and turn[-1] == end]
            texts = [tokenizer.decode(turn).strip() for turn in whole if special.isdisjoint(turn)]
            texts = [text for text in texts if text]
            if not texts:
                raise TeacherError(
                    f"the target wrote no prompt of {SHORTEST} to {LONGEST} tokens in {PROMPTS_PER_FILE} attempts; it "
                    f"seems not to know its chat template. Give prompts with --data"
                )
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(texts, indent=0), encoding="utf-8")
            partial.replace(file)
        yield from json.loads(file.read_text(encoding="utf-8"))
