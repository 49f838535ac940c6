"""What can be trained: each method makes a student, which can be written as its public checkpoint format."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from specrun.distill.draft_model import DraftModelTrainee
from specrun.distill.eagle3 import Eagle3Trainee
from specrun.distill.medusa import MedusaTrainee
from specrun.distill.objective import Objective
from specrun.distill.teacher import Teacher
from specrun.engines.errors import SpecrunError
from specrun.engines.manifest import CHAT_TEMPLATE_FILE, TOKENIZER_FILE
from specrun.export.checkpoint import CONFIG_FILE, Checkpoint
from specrun.export.contract import decoder_layers
from specrun.export.eagle import EagleHead, EagleShape
from specrun.export.eagle_layout import TargetShape
from specrun.export.heads import Head, HeadCheckpoint
from specrun.export.medusa import MedusaHeads

logger = logging.getLogger(__name__)

MEDUSA_HEADS = 3
DRAFT_LAYERS_SHARE = 0.1
FC_NOISE = 0.01


class MethodError(SpecrunError):
    """A method cannot go on from that draft."""


class Student(Protocol):
    """A draft in training."""

    @property
    def trainee(self) -> torch.nn.Module:
        """The draft with its loss."""

    def write(self, directory: Path) -> None:
        """Write the checkpoint, in half precision, into an existing directory."""


class MedusaStudent:
    """Heads that start as the target's own head: residual blocks that do nothing, over its rows."""

    def __init__(self, teacher: Teacher, checkpoint: Checkpoint, ids: torch.Tensor, start: Head | None) -> None:
        self._name, self._ids = checkpoint.name, ids
        weights = teacher.weights()
        old = {} if start is None else start.module.state_dict()
        self._heads = MedusaHeads(MEDUSA_HEADS, 1, teacher.model.signature.hidden_size, len(ids))
        if start is not None and old.keys() != self._heads.state_dict().keys():
            raise MethodError(f"the draft to start from has other heads than {MEDUSA_HEADS} of one layer")
        with torch.no_grad():
            for name, value in self._heads.state_dict().items():
                if ".linear." not in name:
                    value.copy_(_rows(weights["lm_head"], ids, old.get(name), start))
                elif start is not None:
                    value.copy_(old[name])
                else:
                    value.zero_()
        self._vocabulary = len(weights["lm_head"])
        self.trainee: torch.nn.Module = MedusaTrainee(self._heads, Objective(weights["lm_head"], ids))

    def write(self, directory: Path) -> None:
        config = {
            "medusa_num_heads": len(self._heads),
            "medusa_num_layers": 1,
            "base_model_name_or_path": self._name,
            "draft_vocab_size": len(self._ids),  # with d2t and t2d as EAGLE-3 has them
        }
        _write_config(directory, config)
        weights = _half(self._heads.state_dict()) | _maps(self._ids, self._vocabulary)
        save_file(weights, directory / "medusa_lm_head.safetensors")


class Eagle3Student:
    """A head whose layer starts as the target's last one, and whose vocabulary as the target's rows."""

    def __init__(self, teacher: Teacher, checkpoint: Checkpoint, ids: torch.Tensor, start: Head | None) -> None:
        self._ids = ids
        weights = teacher.weights()
        shape = EagleShape(3, teacher.model.signature.hidden_size, teacher.model.signature.taps[:-1], len(ids))
        self._vocabulary = len(weights["lm_head"])
        if start is not None:
            assert isinstance(start.module, EagleHead)
            if replace(start.module.shape, draft_vocab_size=len(ids)) != shape:
                raise MethodError(f"the draft to start from is made as {start.module.shape}; expected {shape}")
            old = start.module.state_dict()
            old["lm_head.weight"] = _rows(weights["lm_head"], ids, old["lm_head.weight"], start)
            self._head = EagleHead(start.module.config, shape)
            self._head.load_state_dict(old)
        else:
            self._head = EagleHead(_layer_config(teacher), shape)
            _start_from_target(self._head, weights, ids)
        self._head.config._attn_implementation = "sdpa"
        # As in speculators: the rows of the target's head say what a state must look like to mean a token.
        self._head.embed_tokens.weight.requires_grad_(False)
        self._head.lm_head.weight.requires_grad_(False)
        self.trainee: torch.nn.Module = Eagle3Trainee(self._head, Objective(weights["lm_head"], ids))

    def write(self, directory: Path) -> None:
        config = self._head.config.to_diff_dict() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self._ids),
        }
        _write_config(directory, config)
        weights = {name: value for name, value in self._head.state_dict().items() if not name.startswith("embed_")}
        save_file(_half(weights) | _maps(self._ids, self._vocabulary), directory / "model.safetensors")


class DraftModelStudent:
    """The target with most of its layers taken out, evenly: embedding and head are kept."""

    def __init__(self, teacher: Teacher, checkpoint: Checkpoint, ids: torch.Tensor, start: Head | None) -> None:
        assert start is None
        self._teacher = teacher
        target = checkpoint.load(torch.float32)
        layers = decoder_layers(target)
        kept = max(2, round(DRAFT_LAYERS_SHARE * len(layers)))
        chosen = [round(index * (len(layers) - 1) / (kept - 1)) for index in range(kept)]
        config = type(target.config).from_dict(
            {key: value for key, value in target.config.to_dict().items() if key != "quantization_config"}
            | {"num_hidden_layers": kept, "dtype": "float32"}
        )
        if getattr(config, "layer_types", None):
            config.layer_types = [target.config.layer_types[layer] for layer in chosen]
        self._model = AutoModelForCausalLM.from_config(config)
        old = {id(layer): index for index, layer in enumerate(layers)}
        assert len(old) == len(layers)
        for mine, layer in zip(decoder_layers(self._model), chosen, strict=True):
            mine.load_state_dict(layers[layer].state_dict())
        theirs = target.state_dict()
        rest = {name: value for name, value in theirs.items() if ".layers." not in name and ".h." not in name}
        self._model.load_state_dict(rest, strict=False)
        self._model.config._attn_implementation = "sdpa"
        head = target.get_output_embeddings().weight.detach()
        self.trainee: torch.nn.Module = DraftModelTrainee(self._model, Objective(head, torch.arange(len(head))))

    def write(self, directory: Path) -> None:
        self._model.half().save_pretrained(directory)
        for name in (TOKENIZER_FILE, CHAT_TEMPLATE_FILE):
            if (self._teacher.directory / name).is_file():
                (directory / name).write_bytes((self._teacher.directory / name).read_bytes())


METHODS: dict[str, Callable[[Teacher, Checkpoint, torch.Tensor, Head | None], Student]] = {
    "medusa": MedusaStudent,
    "eagle3": Eagle3Student,
    "draft": DraftModelStudent,
}


def load_start(directory: Path, method: str, teacher: Teacher, checkpoint: Checkpoint) -> Head:
    """The trained draft in `directory`, to be trained further by `method`. Raises MethodError or CheckpointError."""
    found = HeadCheckpoint.recognize(directory)
    if found is None or found.kind != method:
        raise MethodError(
            f"cannot start from {directory}: it holds {'no head' if found is None else found.kind}, "
            f"expected a draft of the method {method}; only heads can be trained further"
        )
    weights, signature = teacher.weights(), teacher.model.signature
    return found.load(
        TargetShape(
            checkpoint.name,
            signature.num_layers,
            signature.hidden_size,
            weights["embed_tokens"],
            weights["lm_head"],
        )
    )


def _rows(target: torch.Tensor, ids: torch.Tensor, old: torch.Tensor | None, start: Head | None) -> torch.Tensor:
    """The rows of a draft's head for `ids`: `old` ones where the draft to start from knew the token, the target's
    elsewhere."""
    rows = target[ids].clone()
    if old is not None and start is not None:
        old_ids = torch.arange(len(old)) if start.vocabulary is None else start.vocabulary
        place = torch.full((len(target),), -1)
        place[old_ids] = torch.arange(len(old_ids))
        known = place[ids] >= 0
        rows[known] = old[place[ids][known]]
    return rows


def _layer_config(teacher: Teacher) -> LlamaConfig:
    """Of a layer like the target's, as far as a Llama layer can be."""
    target, signature = teacher.config(), teacher.model.signature
    return LlamaConfig(
        vocab_size=target["vocab_size"],
        hidden_size=signature.hidden_size,
        intermediate_size=target.get("intermediate_size") or 4 * signature.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target["num_attention_heads"],
        num_key_value_heads=signature.kv_heads,
        head_dim=signature.head_dim,
        rms_norm_eps=target.get("rms_norm_eps") or 1e-5,
        max_position_embeddings=teacher.model.context.limit,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(target)},
    )


def _start_from_target(head: EagleHead, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> None:
    """Copy what fits; what the target has in another form stays random."""
    state = head.state_dict()
    hidden = head.config.hidden_size
    found: dict[str, torch.Tensor] = {
        "embed_tokens.weight": weights["embed_tokens"],
        "lm_head.weight": weights["lm_head"][ids],
    }
    if "norm" in weights:
        found["norm.weight"] = weights["norm"]
    for name in state:
        if name.startswith("midlayer."):
            old = weights.get(f"layer.{name.removeprefix('midlayer.')}")
            if old is not None and state[name].shape == (*old.shape[:-1], 2 * hidden):
                old = torch.cat([old, old], -1) * 0.7  # tokens and features, each with its own norm
            if old is not None and old.shape == state[name].shape:
                found[name] = old
    missing = sorted(name for name in state if name.startswith("midlayer.") and name not in found)
    if missing:
        logger.info("%d of the layer's weights start at random: the target has no such: %s", len(missing), missing[:3])
    with torch.no_grad():
        for name, value in found.items():
            state[name].copy_(value)
        # Features start as the latest tap, so that the layer meets what it is used to.
        head.fc.weight.normal_(0, FC_NOISE)
        head.fc.weight[:, -hidden:] += torch.eye(hidden)


def _rope_theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta")
    return float(theta) if theta else 10_000.0


def _half(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().half().contiguous() for name, value in weights.items()}


def _maps(ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    if len(ids) == vocab_size:
        return {}
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def _write_config(directory: Path, config: dict[str, Any]) -> None:
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
