"""The target as a teacher: an engine that also puts out hidden states, and the weights a draft starts from."""

import gc
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from specrun.engines import ort
from specrun.engines.card import CARD_FILE, ExportCard
from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import CHAT_TEMPLATE_FILE, ENGINE_FILE, TOKENIZER_FILE, ModelEntry
from specrun.engines.staging import staged_directory
from specrun.engines.vocabulary import load_tokenizer
from specrun.export.checkpoint import CONFIG_FILE, Checkpoint
from specrun.export.contract import decoder_layers
from specrun.export.eagle_layout import eagle3_taps
from specrun.export.graph import write_export
from specrun.export.taps import add_taps
from specrun.runner import chat

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "teacher.safetensors"
FINGERPRINT_FILE = "fingerprint"
USER_TEXT = "(what the user says)"


class TeacherError(SpecrunError):
    """A target that no head can be trained for."""


@dataclass(frozen=True)
class Teacher:
    """A compiled target, in `directory`, with the taps that all methods together need: EAGLE-3's, then the last."""

    directory: Path
    model: ModelEntry

    @classmethod
    def prepare(cls, checkpoint: Checkpoint, directory: Path) -> "Teacher":
        """Export and compile, unless `directory` holds the same already. Raises TeacherError."""
        fingerprint = checkpoint.fingerprint()
        stamp = directory / FINGERPRINT_FILE
        if not (stamp.is_file() and stamp.read_text() == fingerprint):
            layers = checkpoint.config.num_hidden_layers
            if len(set(eagle3_taps(layers))) != 3 or min(eagle3_taps(layers)) < 0:
                raise TeacherError(f"{checkpoint.name} has {layers} layers, too few for three different taps")
            with staged_directory(directory, CARD_FILE) as staging:
                _make(checkpoint, staging)
                (staging / FINGERPRINT_FILE).write_text(fingerprint)
        return cls(directory, ExportCard.read(directory).model)

    @property
    def fingerprint(self) -> str:
        """Of the target's checkpoint."""
        return (self.directory / FINGERPRINT_FILE).read_text()

    def weights(self) -> dict[str, torch.Tensor]:
        """fp32: `lm_head` and `embed_tokens` [vocabulary, hidden], `norm` where there is one, and the last layer's
        as `layer.*`."""
        weights: dict[str, torch.Tensor] = load_file(self.directory / WEIGHTS_FILE)
        return weights

    def config(self) -> dict[str, Any]:
        """The target's transformers config."""
        config: dict[str, Any] = json.loads((self.directory / CONFIG_FILE).read_text(encoding="utf-8"))
        return config

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.directory / TOKENIZER_FILE)

    def encode(self, tokenizer: Tokenizer, prompt: str) -> list[int]:
        """Token ids of a prompt, as the user's side of a conversation where the target is made for that."""
        if not (self.directory / CHAT_TEMPLATE_FILE).is_file():
            return list(tokenizer.encode(prompt).ids)
        return list(tokenizer.encode(self._chat(prompt), add_special_tokens=False).ids)

    def user_turn(self, tokenizer: Tokenizer) -> tuple[list[int], int]:
        """The token ids of a chat up to where the user's text begins, and the token that ends this text.

        Raises TeacherError without a chat template.
        """
        if not (self.directory / CHAT_TEMPLATE_FILE).is_file():
            raise TeacherError("the target has no chat template, so it cannot write prompts; give others with --data")
        opening, _, rest = self._chat(USER_TEXT).partition(USER_TEXT)
        before, after = (list(tokenizer.encode(part, add_special_tokens=False).ids) for part in (opening, rest))
        if not before or not after:
            raise TeacherError(
                "the target's chat template has nothing before or nothing behind the user's text, so the target cannot "
                "write prompts; give others with --data"
            )
        return before, int(after[0])

    def _chat(self, prompt: str) -> str:
        template = (self.directory / CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
        return chat.render(template, [{"role": "user", "content": prompt}], self.model.special_tokens)


def _make(checkpoint: Checkpoint, directory: Path) -> None:
    export = directory / "export"
    export.mkdir()
    card = write_export(checkpoint, export, "fp32", {})
    layers = card.model.signature.num_layers
    signature = replace(card.model.signature, taps=(*eagle3_taps(layers), layers))
    graph = ir.load(export / ENGINE_FILE)
    add_taps(graph, signature)
    ir.save(graph, export / "tapped.onnx")
    del graph
    ort.compile_graph(export / "tapped.onnx", directory / ENGINE_FILE)
    for file in export.iterdir():
        if file.name in (TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
            file.rename(directory / file.name)
        else:
            file.unlink()
    export.rmdir()
    replace(card, model=replace(card.model, signature=signature)).write(directory)
    model = checkpoint.load(torch.float32)
    weights = {
        "lm_head": model.get_output_embeddings().weight,
        "embed_tokens": model.get_input_embeddings().weight,
        **{f"layer.{name}": value for name, value in decoder_layers(model)[-1].state_dict().items()},
    }
    if (norm := getattr(model.base_model, "norm", None)) is not None and norm.weight.dim() == 1:
        weights["norm"] = norm.weight
    save_file({name: value.detach().clone() for name, value in weights.items()}, directory / WEIGHTS_FILE)
    model.config.to_json_file(directory / CONFIG_FILE, use_diff=False)
    del model
    gc.collect()
