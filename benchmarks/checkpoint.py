"""Saves the built-in model as a Hugging Face folder in fp32: `python -m benchmarks.checkpoint DIRECTORY`.

Runs in specrun's environment.
"""

import copy
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from specrun.export.checkpoint import Checkpoint
from specrun.export.tokenizer import write_tokenizer
from specrun.runner.commands.build import downloads

MODEL = "smollm2-135m"


def save(directory: Path) -> None:
    checkpoint = Checkpoint.open(MODEL, downloads())
    loaded = checkpoint.load(torch.float32)
    # A model that was loaded from GGUF cannot be saved: it counts as quantized. A fresh one with its weights can.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)
    tokenizer, special = write_tokenizer(checkpoint, directory)
    template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special).save_pretrained(directory)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
