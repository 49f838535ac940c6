"""Draft heads in every published layout: they load and compute what the layout says; what is wrong is refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrun.engines.manifest import EAGLE, EAGLE3, MEDUSA
from specrun.export.checkpoint import CheckpointError
from specrun.export.eagle import EagleHead
from specrun.export.eagle_layout import TargetShape
from specrun.export.head_graph import write_head
from specrun.export.heads import Head, HeadCheckpoint
from tests import tiny_heads
from tests.tiny_heads import DRAFT_IDS, HIDDEN, VOCABULARY

GENERATOR = torch.Generator().manual_seed(5)
TARGET = TargetShape(
    name="tiny",
    num_layers=8,
    hidden_size=HIDDEN,
    embed_tokens=torch.randn(VOCABULARY, HIDDEN, generator=GENERATOR),
    lm_head=torch.randn(VOCABULARY, HIDDEN, generator=GENERATOR),
)

LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "medusa .pt": (tiny_heads.medusa, MEDUSA),
    "medusa safetensors": (lambda path: tiny_heads.medusa(path, pickle=None), MEDUSA),
    "eagle-1": (tiny_heads.eagle1, EAGLE),
    "eagle-3": (tiny_heads.eagle3, EAGLE3),
    "eagle-3, whole vocabulary": (lambda path: tiny_heads.eagle3(path, ids=None), EAGLE3),
    "speculators eagle": (tiny_heads.speculators_eagle1, EAGLE),
    "speculators eagle, layernorms": (lambda path: tiny_heads.speculators_eagle1(path, layernorms=True), EAGLE),
    "speculators eagle3": (tiny_heads.speculators_eagle3, EAGLE3),
    "speculators eagle3, flags": (
        lambda path: tiny_heads.speculators_eagle3(
            path, norm_before_residual=True, norm_before_fc=True, norm_output=True
        ),
        EAGLE3,
    ),
    "speculators eagle3, fc_norm": (lambda path: tiny_heads.speculators_eagle3(path, fc_norm=True), EAGLE3),
}


def load(directory: Path) -> Head:
    checkpoint = HeadCheckpoint.recognize(directory)
    assert checkpoint is not None
    return checkpoint.load(TARGET)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_published_layout_is_recognized_and_exported(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The graphs are compared with PyTorch while they are written."""
    make, kind = LAYOUTS[layout]
    checkpoint = HeadCheckpoint.recognize(make(tmp_path / "checkpoint"))
    assert checkpoint is not None
    assert checkpoint.kind == kind
    out = tmp_path / "out"
    out.mkdir()
    entry = write_head(checkpoint.load(TARGET), checkpoint.name, out, dtype, capacity=256)
    assert entry.taps == ((2, 4, 5) if kind == EAGLE3 else (8,))
    assert entry.positions == (3 if kind == MEDUSA else 0)
    assert (out / "fuse.onnx").is_file() == (kind == EAGLE3)


@pytest.mark.parametrize("layout", ["eagle-3", "speculators eagle3, flags", "speculators eagle3, fc_norm", "eagle-1"])
def test_head_computes_what_the_papers_say(layout: str, tmp_path: Path) -> None:
    """Written out once more, by hand, for a sequence of one token: attention is then its value alone."""
    directory = LAYOUTS[layout][0](tmp_path)
    module = load(directory).module
    assert isinstance(module, EagleHead)
    module.config._attn_implementation = "sdpa"
    weights = {name: value.float() for name, value in module.state_dict().items()}
    config = json.loads((directory / "config.json").read_text())
    states = torch.randn(1, 1, (3 if module.shape.version == 3 else 1) * HIDDEN, generator=GENERATOR)
    token = torch.tensor([[7]])
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad():
        feature = module.states(token, module.fuse(states), torch.tensor([[0]]), mask, None)
        logits = module.logits(feature)
    expected_feature, expected_logits = by_hand(weights, config, states, module.shape.version)
    torch.testing.assert_close(feature, expected_feature, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-3)


def by_hand(
    weights: dict[str, torch.Tensor], config: dict[str, Any], states: torch.Tensor, version: int
) -> tuple[torch.Tensor, torch.Tensor]:
    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weights[f"{name}.weight"]

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))

    embedded = weights["embed_tokens.weight"][7][None, None]
    layer = "midlayer" if version == 3 else "layers.0"
    if version == 3:
        if config.get("norm_before_fc"):
            states = norm("input_norm", states)
        if config.get("fc_norm"):
            states = torch.cat(
                [norm(f"fc_norm.{i}", part) for i, part in enumerate(states.reshape(1, 1, 3, HIDDEN).unbind(-2))], -1
            )
        fused = linear("fc", states)
        normed = norm(f"{layer}.hidden_norm", fused)
        residual = normed if config.get("norm_before_residual") else fused
        inputs = torch.cat([norm(f"{layer}.input_layernorm", embedded), normed], -1)
    else:
        inputs = residual = linear("fc", torch.cat([embedded, states], -1))
    value = linear(f"{layer}.self_attn.v_proj", inputs)  # two heads, each shared by two queries
    shared = value.view(1, 1, 2, 1, 16).expand(1, 1, 2, 2, 16).reshape(1, 1, HIDDEN)
    hidden = residual + linear(f"{layer}.self_attn.o_proj", shared)
    x = norm(f"{layer}.post_attention_layernorm", hidden)
    gate = torch.nn.functional.silu(linear(f"{layer}.mlp.gate_proj", x))
    hidden = hidden + linear(f"{layer}.mlp.down_proj", gate * linear(f"{layer}.mlp.up_proj", x))
    normed = norm("norm", hidden) if version == 3 else hidden
    return (normed if config.get("norm_output") else hidden), linear("lm_head", normed)


def test_what_a_head_borrows_is_the_targets(tmp_path: Path) -> None:
    eagle1, eagle3 = load(tiny_heads.eagle1(tmp_path / "1")).module, load(tiny_heads.eagle3(tmp_path / "3")).module
    assert torch.equal(eagle1.state_dict()["lm_head.weight"], TARGET.lm_head)
    assert torch.equal(eagle3.state_dict()["embed_tokens.weight"], TARGET.embed_tokens)


def test_offsets_become_ids(tmp_path: Path) -> None:
    vocabulary = load(tiny_heads.eagle3(tmp_path)).vocabulary
    assert vocabulary is not None
    assert torch.equal(vocabulary, DRAFT_IDS)


def edited(make: Callable[[Path], Path], edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], Path]:
    """A checkpoint whose weights were changed."""

    def changed(path: Path) -> Path:
        directory = make(path)
        weights = load_file(directory / "model.safetensors")
        edit(weights)
        save_file(weights, directory / "model.safetensors")
        return directory

    return changed


def drop(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name in names:
            del weights[name]

    return edit


def set_to(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({name: value})


FAULTY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absolute d2t": (
        edited(tiny_heads.eagle3, set_to("d2t", DRAFT_IDS.clone())),
        "absolute token ids; expected offsets",
    ),
    "absolute d2t without t2d": (
        edited(edited(tiny_heads.eagle3, drop("t2d")), set_to("d2t", DRAFT_IDS // 2)),
        "absolute token ids; expected offsets",
    ),
    "zero d2t": (edited(tiny_heads.eagle3, set_to("d2t", torch.zeros_like(DRAFT_IDS))), "all zero"),
    "missing d2t": (edited(tiny_heads.eagle3, drop("d2t")), "no map d2t"),
    "d2t of another length": (edited(tiny_heads.eagle3, set_to("d2t", DRAFT_IDS[:50].clone())), "50.* entries"),
    "d2t against t2d": (
        edited(tiny_heads.eagle3, set_to("t2d", torch.ones(VOCABULARY, dtype=torch.bool))),
        "not those that t2d marks",
    ),
    "descending d2t": (edited(tiny_heads.eagle3, set_to("d2t", -torch.arange(len(DRAFT_IDS)))), "not ascending"),
    "missing norm": (edited(tiny_heads.eagle3, drop("norm.weight")), "missing norm.weight"),
    "missing hidden norm": (edited(tiny_heads.eagle3, drop("midlayer.hidden_norm.weight")), "hidden_norm"),
    "missing head": (edited(tiny_heads.eagle3, drop("lm_head.weight", "d2t", "t2d")), "missing lm_head.weight"),
    "unknown weight": (edited(tiny_heads.eagle3, set_to("extra.weight", torch.ones(2))), "unknown extra.weight"),
    "draft vocabulary in the config": (lambda path: tiny_heads.eagle3(path, draft_vocab_size=50), "draft_vocab_size"),
    "tap beyond the last layer": (
        lambda path: tiny_heads.eagle3(path, eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        "reads the hidden states",
    ),
    "another number of taps": (
        lambda path: tiny_heads.eagle3(path, eagle_aux_hidden_state_layer_ids=[2, 4]),
        r"fc.weight is \(64, 192\), expected \(64, 128\)",
    ),
    "another target's width": (lambda path: tiny_heads.eagle3(path, target_hidden_size=128), "128 hidden units"),
    "speculators flag unknown": (
        lambda path: tiny_heads.speculators_eagle3(path, rotate_outputs=True),
        "flags that specrun does not know: rotate_outputs",
    ),
    "speculators flag without its weight": (
        lambda path: tiny_heads.speculators_eagle3(path, tiny_heads.eagle3_weights(), norm_before_fc=True),
        "missing input_norm.weight",
    ),
    "speculators kind": (
        lambda path: tiny_heads.speculators_eagle3(path, speculators_model_type="dflash"),
        "kind 'dflash'",
    ),
    "speculators layer": (
        lambda path: tiny_heads.speculators_eagle3(
            path, transformer_layer_config=tiny_heads.layer_config(model_type="qwen3")
        ),
        "expected 1 of llama",
    ),
    "medusa without a head's layer": (
        edited(lambda path: tiny_heads.medusa(path, pickle=None), drop("1.0.linear.bias")),
        "1.0.linear.bias is missing",
    ),
    "medusa with a hole": (
        edited(
            lambda path: tiny_heads.medusa(path, pickle=None),
            drop("1.0.linear.weight", "1.0.linear.bias", "1.1.weight"),
        ),
        "no complete Medusa heads",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_faulty_checkpoint_is_refused(fault: str, tmp_path: Path) -> None:
    """Known fault 15, and its like."""
    make, reason = FAULTY[fault]
    directory = make(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        load(directory)


def test_head_count_that_contradicts_the_config_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specrun"):
        head = load(tiny_heads.medusa(tmp_path, medusa_num_heads=5))
    assert len(head.module) == 3  # type: ignore[arg-type] # these are Medusa heads
    assert "medusa_num_heads = 5, its weights have 3 heads" in caplog.text


def test_unusual_taps_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Known fault 16: ids that count the states leaving a layer are all one too low."""
    with caplog.at_level(logging.WARNING, "specrun"):
        head = load(tiny_heads.eagle3(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
    assert head.taps == (1, 3, 4)
    assert "EAGLE-3 usually reads (2, 4, 5)" in caplog.text
    assert "one higher" in caplog.text


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "owned",))

    tiny_heads.medusa(tmp_path)
    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_language_models_and_files_are_no_heads(tmp_path: Path, target_checkpoint: Path) -> None:
    assert HeadCheckpoint.recognize(target_checkpoint) is None
    assert HeadCheckpoint.recognize(tmp_path / "nothing") is None
