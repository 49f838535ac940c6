"""Opening and loading checkpoints: every form that is published, and every one that must be refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter

from specrun.engines.context import ContextError
from specrun.engines.vocabulary import load_tokenizer
from specrun.export.checkpoint import Checkpoint, CheckpointError
from specrun.export.family import UnsupportedModelError, context_of
from specrun.export.graph import export_model
from specrun.export.tokenizer import write_tokenizer
from tests import tiny


def opened(directory: Path) -> Checkpoint:
    return Checkpoint.open(str(directory), directory / "downloads")


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_weights_in_every_published_form(dtype: torch.dtype, tied: bool, shard_size: str, tmp_path: Path) -> None:
    model = tiny.make_model(tiny.llama(tie_word_embeddings=tied)).to(dtype)
    tiny.save_checkpoint(tmp_path, model, max_shard_size=shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard_size == "5GB"
    checkpoint = opened(tmp_path)
    assert checkpoint.parameters == sum(parameter.numel() for parameter in model.parameters())
    loaded = checkpoint.load(torch.float32)
    for (name, wanted), got in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(wanted.float(), got), name


def remove(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).unlink()


def truncate_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def drop_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def drop_shard(directory: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda path: remove(path, "config.json"), "no config.json"),
    "config not JSON": (lambda path: (path / "config.json").write_text("{"), "cannot read"),
    "unknown type": (lambda path: edit_config(path, model_type="nosuchmodel"), "nosuchmodel"),
    "no weights": (lambda path: remove(path, "model.safetensors"), "lacks the weights"),
    "truncated weights": (truncate_weights, "damaged or truncated"),
    "missing weight": (drop_weight, "incomplete: 1 missing"),
    "missing shard": (drop_shard, "00001-of-00002"),
    "wrong shape": (lambda path: edit_config(path, hidden_size=32), "cannot be loaded"),
    "no tokenizer": (
        lambda path: remove(path, "tokenizer.json", "tokenizer_config.json"),
        "tokenizer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused(damage: str, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, tiny.make_model(tiny.llama()))
    spoil, reason = DAMAGES[damage]
    spoil(tmp_path)
    (tmp_path / "out").mkdir()

    def use() -> None:
        checkpoint = opened(tmp_path)
        checkpoint.load(torch.float32)
        write_tokenizer(checkpoint, tmp_path / "out")

    with pytest.raises(CheckpointError, match=reason):
        use()


def test_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(str(tmp_path / "nowhere"), tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"not a \.gguf"):
        Checkpoint.open(str(tmp_path / "model.bin"), tmp_path)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "encoder-decoder": (transformers.T5Config(), {}, "encoder-decoder"),
    "masked language model": (
        transformers.BertConfig(),
        {"architectures": ["BertForMaskedLM"]},
        "BertForMaskedLM",
    ),
    "classifier": (
        tiny.llama(),
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification",
    ),
    "recurrent": (transformers.MambaConfig(), {}, "recurrent"),
    "hybrid": (transformers.Qwen3NextConfig(), {}, "recurrent"),
    "vision": (transformers.ViTConfig(), {}, "no causal language model"),
    "quantized": (tiny.llama(), {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
    "dynamic rope": (
        tiny.llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        {},
        "changes with the length",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_model_that_cannot_be_exact_is_refused(kind: str, tmp_path: Path) -> None:
    config, changes, reason = REFUSED[kind]
    config.save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        opened(tmp_path)


def test_remote_code_is_refused(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    edit_config(tmp_path, model_type="custom", auto_map={"AutoConfig": "custom.Config"})
    with pytest.raises(CheckpointError, match="cannot read"):
        opened(tmp_path)


def test_sliding_window_limits_the_capacity(tmp_path: Path) -> None:
    windowed = tiny.family_configs()["mistral"]
    windowed.sliding_window = 128
    context_of(windowed).require(128, "mistral")
    with pytest.raises(ContextError, match="sliding window of 128 tokens is shorter than the capacity of 129"):
        context_of(windowed).require(129, "mistral")
    unused = tiny.family_configs()["qwen2"]  # has a window that no layer uses
    unused.sliding_window, unused.layer_types = 128, ["full_attention", "full_attention"]
    context_of(unused).require(512, "qwen2")
    with pytest.raises(ContextError, match="trained for 512 positions"):
        context_of(unused).require(513, "qwen2")
    # Nothing says how a file with open axes will be used.
    checkpoint = opened(tiny.save_checkpoint(tmp_path / "model", tiny.make_model(windowed)))
    with pytest.raises(ContextError, match="sliding window of 128 tokens is shorter than the capacity of 512"):
        export_model(checkpoint, tmp_path / "out", "fp32", None, None)


def write_gguf(path: Path, pre_tokenizer: str) -> None:
    """A llama of one layer with a byte-level vocabulary."""
    tokenizer = tiny.make_tokenizer()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    hidden, feed_forward, heads = 64, 128, 4
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(by_id))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([token for token, _ in by_id])
    writer.add_token_types([3 if token == tiny.END else 1 for token, _ in by_id])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(by_id) - 1)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(by_id), hidden), "output_norm": (hidden,)}
    shapes |= {f"blk.0.attn_{part}": (hidden, hidden) for part in ("q", "k", "v", "output")}
    shapes |= {
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.ffn_down": (hidden, feed_forward),
    }
    shapes |= {f"blk.0.ffn_{part}": (feed_forward, hidden) for part in ("gate", "up")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "smollm")
    checkpoint = Checkpoint.open(str(tmp_path / "model.gguf"), tmp_path)
    model = checkpoint.load(torch.float32)
    assert checkpoint.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert checkpoint.stop_token_ids() == (tiny.VOCABULARY_SIZE - 1,)
    tokenizer, special = write_tokenizer(checkpoint, tmp_path)
    assert special["eos_token"] == tiny.END
    assert (tmp_path / "chat_template.jinja").read_text() == tiny.CHAT_TEMPLATE
    # SmolLM's pre-tokenizer: every digit alone, and the spaces before one stay together.
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("an 12  3")]
    assert pieces == ["an", "Ġ", "1", "2", "ĠĠ", "3"]


def test_gguf_with_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "nosuchpre")
    with pytest.raises(CheckpointError, match="nosuchpre"):
        write_tokenizer(Checkpoint.open(str(tmp_path / "model.gguf"), tmp_path), tmp_path)


def test_damaged_gguf_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "smollm")
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError):
        Checkpoint.open(str(tmp_path / "model.gguf"), tmp_path)


def test_published_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    """But for padding and truncation, which are training's."""
    published = tiny.make_tokenizer()
    published.enable_padding(length=32)
    published.enable_truncation(max_length=4)
    tiny.save_checkpoint(tmp_path, tiny.make_model(tiny.llama()), published)
    (tmp_path / "out").mkdir()
    write_tokenizer(opened(tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer.json")
    assert tokenizer.encode("abcdefgh").ids == tiny.make_tokenizer().encode("abcdefgh").ids
