"""Tiny draft heads in every published layout, random, for the tiny targets of tests/tiny.py."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from specrun.export.eagle import EagleHead, EagleShape
from specrun.export.medusa import MedusaHeads

HIDDEN, VOCABULARY = 64, 320
DRAFT_IDS = torch.arange(0, 296, 3)  # a reduced vocabulary
SHARPNESS = 12.0

Weights = dict[str, torch.Tensor]


def layer_config(**changes: Any) -> dict[str, Any]:
    settings = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return settings | changes


def maps(ids: torch.Tensor) -> Weights:
    """d2t and t2d of a reduced vocabulary."""
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def write(directory: Path, config: dict[str, Any], weights: Weights, pickle: str | None = None) -> Path:
    """A checkpoint folder; `pickle`: name of a .pt or .bin file instead of safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickle is None:
        save_file({key: value.contiguous() for key, value in weights.items()}, directory / "model.safetensors")
    else:
        torch.save(weights, directory / pickle)
    return directory


def random_weights(module: torch.nn.Module, seed: int) -> Weights:
    torch.manual_seed(seed)
    return {
        key: 1 + 0.1 * torch.randn_like(value) if "norm" in key else torch.randn_like(value) * 0.15
        for key, value in module.state_dict().items()
    }


def medusa_weights(heads: int = 3, layers: int = 1, size: int = VOCABULARY, seed: int = 0) -> Weights:
    weights = random_weights(MedusaHeads(heads, layers, HIDDEN, size), seed)
    return {key: value * SHARPNESS if key.endswith(f".{layers}.weight") else value for key, value in weights.items()}


def medusa(directory: Path, pickle: str | None = "medusa_lm_head.pt", **config: Any) -> Path:
    """As FasterDecoding publishes them."""
    settings = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    return write(directory, settings | config, medusa_weights(), pickle)


def eagle1_weights(seed: int = 1, bias: bool = True) -> Weights:
    head = EagleHead(LlamaConfig.from_dict(layer_config()), EagleShape(1, HIDDEN, (2,), VOCABULARY, fc_bias=bias))
    weights = random_weights(head, seed)
    del weights["lm_head.weight"]
    return weights


def eagle1(directory: Path) -> Path:
    """As SafeAILab publishes EAGLE-1 and 2: fc has a bias, the first norm is missing, the head is the target's."""
    return write(directory, layer_config(), eagle1_weights(), "pytorch_model.bin")


def eagle3_weights(ids: torch.Tensor | None = DRAFT_IDS, seed: int = 2, **flags: bool) -> Weights:
    size = VOCABULARY if ids is None else len(ids)
    shape = EagleShape(3, HIDDEN, (2, 4, 5), size, **flags)
    weights = random_weights(EagleHead(LlamaConfig.from_dict(layer_config()), shape), seed)
    weights["lm_head.weight"] *= SHARPNESS
    return weights | ({} if ids is None else maps(ids))


def eagle3(directory: Path, ids: torch.Tensor | None = DRAFT_IDS, **config: Any) -> Path:
    """As SafeAILab publishes EAGLE-3; the embedding is the target's."""
    weights = eagle3_weights(ids)
    del weights["embed_tokens.weight"]
    size = VOCABULARY if ids is None else len(ids)
    return write(directory, layer_config(draft_vocab_size=size) | config, weights)


def speculators_eagle3(directory: Path, weights: Weights | None = None, **config: Any) -> Path:
    """As vLLM's speculators publishes EAGLE-3."""
    weights = weights or eagle3_weights(
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        norm_output=bool(config.get("norm_output")),
        norm_per_tap=bool(config.get("fc_norm")),
    )
    settings = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3DraftModel"],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(),
        "draft_vocab_size": len(DRAFT_IDS),
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        **config,
    }
    renamed = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    return write(directory, settings, renamed)


def speculators_eagle1(directory: Path, layernorms: bool = False, **config: Any) -> Path:
    """As vLLM's speculators publishes EAGLE-1."""
    shape = EagleShape(1, HIDDEN, (2,), VOCABULARY, fc_bias=False, layernorms=layernorms)
    weights = random_weights(EagleHead(LlamaConfig.from_dict(layer_config()), shape), seed=3)
    names = {
        "fc.": "fusion_fc.",
        "layers.0.": "transformer.",
        "embed_norm.": "embedding_layernorm.",
        "norm.": "pre_lm_head_layernorm.",
    }
    renamed = {}
    for key, value in weights.items():
        prefix = next((old for old in names if key.startswith(old)), None)
        if prefix is not None:
            renamed[names[prefix] + key.removeprefix(prefix)] = value
    settings = {
        "speculators_model_type": "eagle",
        "speculators_version": "0.3.0",
        "architectures": ["EagleSpeculator"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer_config(),
        "layernorms": layernorms,
        "fusion_bias": False,
        **config,
    }
    return write(directory, settings, renamed)
