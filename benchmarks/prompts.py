"""The prompts as token ids, the same for every system."""

import json
from pathlib import Path

from specrun.engines.vocabulary import load_tokenizer
from specrun.runner import chat
from specrun.runner.prompt_set import load_prompt_set


def encode_sets(names: tuple[str, ...], checkpoint: Path) -> dict[str, list[list[int]]]:
    """Token ids of every prompt of the sets, each as what a user says, through the chat template of `checkpoint`."""
    tokenizer = load_tokenizer(checkpoint / "tokenizer.json")
    template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {role: config[role] for role in ("bos_token", "eos_token")}

    def encode(prompt: str) -> list[int]:
        text = chat.render(template, [{"role": "user", "content": prompt}], special)
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return {name: [encode(prompt) for prompt in load_prompt_set(name)] for name in names}


def stop_token(checkpoint: Path) -> int:
    """The token with which the model ends an answer."""
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    token = load_tokenizer(checkpoint / "tokenizer.json").token_to_id(config["eos_token"])
    assert token is not None
    return token
