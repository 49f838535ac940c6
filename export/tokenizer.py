"""The tokenizer files of a checkpoint, as the runner reads them: tokenizer.json and a chat template."""

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from specrun.engines.errors import first_line
from specrun.engines.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE
from specrun.engines.vocabulary import load_tokenizer
from specrun.export.checkpoint import Checkpoint, CheckpointError, read_json

logger = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Write tokenizer.json and, where there is one, chat_template.jinja into `directory`.

    Returns the tokenizer and the special tokens by role ("bos_token", ...), which chat templates refer to.
    Raises CheckpointError.
    """
    published = checkpoint.directory / TOKENIZER_FILE
    if checkpoint.gguf is None and published.is_file():
        # As it is: transformers' classes for some families would rebuild parts of it.
        load_tokenizer(published)
        (directory / TOKENIZER_FILE).write_bytes(published.read_bytes())
        template, special = (
            _published_template(checkpoint.directory),
            _published_special(checkpoint.directory),
        )
    else:
        converted = _convert(checkpoint)
        converted.backend_tokenizer.save(str(directory / TOKENIZER_FILE))
        template = _one_template(converted.chat_template)
        special = {role: str(token) for role in SPECIAL_TOKENS if (token := getattr(converted, role)) is not None}
    if template is not None:
        (directory / CHAT_TEMPLATE_FILE).write_text(template, encoding="utf-8")
    return load_tokenizer(directory / TOKENIZER_FILE), special


def _convert(checkpoint: Checkpoint) -> Any:
    """Let transformers make a fast tokenizer from sentencepiece or from GGUF metadata."""
    from transformers import AutoTokenizer

    options = {"gguf_file": checkpoint.gguf.name} if checkpoint.gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.directory, trust_remote_code=False, **options)
    except Exception as error:  # depends on which of many converters fails, and how
        raise CheckpointError(
            f"no tokenizer for {checkpoint.name}: {first_line(error)}; put its {TOKENIZER_FILE} beside the weights"
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer of {checkpoint.name} has no fast form; put its {TOKENIZER_FILE} there")
    if checkpoint.gguf is not None:
        _restore_pre_tokenizer(tokenizer.backend_tokenizer, checkpoint.gguf)
    return tokenizer


def _restore_pre_tokenizer(tokenizer: Tokenizer, gguf: Path) -> None:
    """GGUF names the pre-tokenizer of a byte-level BPE; transformers knows most names, not SmolLM's.

    Without this, digits and runs of spaces are split differently than in training.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(gguf))
    model, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or name in GGUF_PRE_TOKENIZER_SPLITS or name == "gpt-2":
        return
    if name != "smollm":
        raise CheckpointError(
            f"{gguf.name} names the pre-tokenizer {name!r}, which cannot be rebuilt from a GGUF file; "
            f"use the model's Hugging Face folder instead"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _published_template(directory: Path) -> str | None:
    file = directory / CHAT_TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return _one_template(read_json(directory / TOKENIZER_CONFIG).get("chat_template"))


def _one_template(template: Any) -> str | None:
    """Some tokenizers have several named templates; the one called "default" is for chatting."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        return template.get("default")
    return None if template is None else str(template)


def _published_special(directory: Path) -> dict[str, str]:
    config = read_json(directory / TOKENIZER_CONFIG)
    special = {role: config[role] for role in SPECIAL_TOKENS if config.get(role) is not None}
    return {role: token["content"] if isinstance(token, dict) else str(token) for role, token in special.items()}
