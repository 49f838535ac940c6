"""Prompt sets for benchmarks: some built in, or a file of the user's."""

import json
from importlib import resources
from pathlib import Path

from specrun.engines.errors import RequestError

PROMPT_SETS = ("chat", "code-editing", "summarizing", "random-words")


def load_prompt_set(name: str) -> list[str]:
    """The prompts of a built-in set, or of a file: a JSON list of strings, or text with one prompt per line.

    Raises RequestError.
    """
    if name in PROMPT_SETS:
        text = (resources.files("specrun.runner") / "prompts" / f"{name}.json").read_text(encoding="utf-8")
        return _json_prompts(name, text)
    path = Path(name)
    if not path.is_file():
        raise RequestError(f"got prompt set {name!r}, expected one of {', '.join(PROMPT_SETS)} or a file")
    text = path.read_text(encoding="utf-8")
    prompts = (
        _json_prompts(name, text) if path.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    )
    if not prompts:
        raise RequestError(f"{name} has no prompts")
    return prompts


def _json_prompts(name: str, text: str) -> list[str]:
    try:
        prompts = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is not JSON: {error}") from error
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(f"{name}: expected a JSON list of strings")
    return prompts
