"""Tiny models, tokenizers and bundles that the tests build for themselves."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from specrun.engines.build import build_bundle
from specrun.engines.build_options import BuildOptions
from specrun.engines.manifest import Bundle

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
END = "<end>"
VOCABULARY_SIZE = 300  # 256 bytes, merges, END; tiny models pad it to a multiple of 64

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY_SIZE - 1,
    "pad_token_id": 0,
}


def _config(name: str, **changes: Any) -> Any:
    return getattr(transformers, name)(**{**_SHAPE, **changes})


def family_configs() -> dict[str, Any]:
    """One small config for each family that export claims to handle."""
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}
    gpt2 = {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
    opt = {"ffn_dim": 128, "word_embed_proj_dim": 64}
    return {
        "llama": _config("LlamaConfig", rope_parameters=llama3_rope),
        "smollm2": _config(
            "LlamaConfig",
            tie_word_embeddings=True,
            num_attention_heads=3,
            num_key_value_heads=1,
            hidden_size=48,
        ),
        "mistral": _config("MistralConfig", sliding_window=None),
        "qwen2": _config("Qwen2Config"),
        "qwen3": _config("Qwen3Config", head_dim=16),
        "phi3": _config("Phi3Config"),
        "gemma2": _config("Gemma2Config", **gemma),
        "gemma3_text": _config("Gemma3TextConfig", **gemma),
        "olmo2": _config("Olmo2Config"),
        "smollm3": _config("SmolLM3Config"),
        "granite": _config("GraniteConfig"),
        "cohere": _config("CohereConfig"),
        "gpt2": transformers.GPT2Config(**gpt2, bos_token_id=None, eos_token_id=_SHAPE["eos_token_id"]),
        "gpt_neox": _config("GPTNeoXConfig"),
        "opt": _config("OPTConfig", **opt),
    }


def llama(**changes: Any) -> Any:
    """Config of a tiny Llama."""
    return _config("LlamaConfig", **changes)


def make_model(config: Any, seed: int = 0, sharpness: float = 1.0) -> Any:
    """A random model. Without `sharpness`, a tiny random model's distribution is nearly uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.abs().sum() == 0:
                parameter.normal_(0, 0.1)  # biases and Gemma's offsets, so that they are tested
        head = model.get_output_embeddings().weight
        head.mul_(sharpness)
    return model


def make_tokenizer(changed: dict[str, str] | None = None) -> Tokenizer:
    """A byte-level BPE of VOCABULARY_SIZE tokens. `changed`: tokens to be spelled otherwise."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(first, second) for first in "aeiouy" for second in "nrstlmdc"][: VOCABULARY_SIZE - 1 - len(alphabet)]
    spelled = [(changed or {}).get(token, token) for token in [*alphabet, *(a + b for a, b in pairs)]]
    vocabulary = {token: index for index, token in enumerate(spelled)}
    merges = [pair for pair in pairs if all(part in vocabulary for part in (*pair, "".join(pair)))]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def save_checkpoint(directory: Path, model: Any, tokenizer: Tokenizer | None = None, **options: Any) -> Path:
    """A Hugging Face folder. `options` go to save_pretrained."""
    model.save_pretrained(directory, **options)
    (tokenizer or make_tokenizer()).save(str(directory / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def make_bundle(directory: Path, target: Path, *drafts: Path | str, **options: Any) -> Bundle:
    """Build a bundle from checkpoint folders. All guesses are proposed: those of random drafts are never sure."""
    out = directory / "bundle"
    settings = BuildOptions(str(target), out, tuple(map(str, drafts)), **{"capacity": 256, "p_min": 0.0, **options})
    build_bundle(settings, directory / "downloads")
    return Bundle.open(out)
