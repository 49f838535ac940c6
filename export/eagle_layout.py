"""How EAGLE heads are laid out in published checkpoints: EAGLE-1 and 2, EAGLE-3, and vLLM's speculators format.

No flag is ignored: one that is not known here is refused, because a head that is computed wrongly still runs, only
its guesses are quietly bad.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig

from specrun.export.checkpoint import CheckpointError
from specrun.export.eagle import EagleHead, EagleShape

logger = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]

# Of a speculators config: what is not of the transformers base class, what this module understands or may leave alone.
SPECULATORS_KEYS = {
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "embed_requires_grad",  # of training only
    "transformer_layer_architecture",
    "layernorms",
    "fusion_bias",
    "has_no_defaults_at_init",
    "base_model_ep_plan",
}
SPECULATORS_EAGLE1_NAMES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embedding_layernorm.": "embed_norm.",
    "pre_lm_head_layernorm.": "norm.",
}


@dataclass(frozen=True)
class TargetShape:
    """What a head must fit, and what it borrows where its checkpoint has none of its own."""

    name: str
    num_layers: int
    hidden_size: int
    embed_tokens: torch.Tensor  # [vocabulary, hidden]
    lm_head: torch.Tensor  # [vocabulary, hidden]

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]


def eagle3_taps(num_layers: int) -> tuple[int, int, int]:
    """Where EAGLE-3 reads the target unless its config says otherwise: the states entering these layers."""
    return (2, num_layers // 2, num_layers - 3)


def read_eagle(
    name: str, config: dict[str, Any], weights: Weights, target: TargetShape
) -> tuple[EagleHead, torch.Tensor | None]:
    """An EAGLE-1, 2 or 3 checkpoint as its authors lay it out. Raises CheckpointError."""
    layer = LlamaConfig.from_dict(config)
    if any(key.startswith("midlayer.") for key in weights):
        return _eagle3(name, layer, config, weights, target, _flag(name, config, "target_hidden_size"))
    bias = bool(config.get("bias", True))
    return _eagle1(name, layer, weights, target, EagleShape(1, target.hidden_size, (), 0, fc_bias=bias))


def read_speculators(
    name: str, config: dict[str, Any], weights: Weights, target: TargetShape
) -> tuple[EagleHead, torch.Tensor | None]:
    """A checkpoint in the speculators format, of the kind eagle or eagle3. Raises CheckpointError."""
    from transformers import PreTrainedConfig

    unknown = sorted(set(config) - SPECULATORS_KEYS - set(PreTrainedConfig().to_dict()) - {"architectures", "auto_map"})
    if unknown:
        raise CheckpointError(
            f"{name} has flags that specrun does not know: {_some(unknown)}; it cannot be run exactly"
        )
    nested = config.get("transformer_layer_config") or {}
    layer = LlamaConfig.from_dict(nested)
    if nested.get("model_type", "llama") != "llama" or layer.num_hidden_layers != 1:
        raise CheckpointError(
            f"{name} is made of {layer.num_hidden_layers} layers of {nested.get('model_type')}; expected 1 of llama"
        )
    if config["speculators_model_type"] == "eagle3":
        weights = {_renamed(key, {"layers.0.": "midlayer."}): value for key, value in weights.items()}
        weights = {key: value for key, value in weights.items() if not key.startswith("verifier_")}
        return _eagle3(name, layer, config, weights, target, config.get("target_hidden_size"))
    weights = {_renamed(key, SPECULATORS_EAGLE1_NAMES): value for key, value in weights.items()}
    shape = EagleShape(
        1,
        target.hidden_size,
        (),
        0,
        fc_bias=bool(config.get("fusion_bias", False)),
        layernorms=bool(config.get("layernorms", False)),
    )
    return _eagle1(name, layer, weights, target, shape)


def _eagle1(
    name: str, layer: LlamaConfig, weights: Weights, target: TargetShape, shape: EagleShape
) -> tuple[EagleHead, None]:
    shape = replace(shape, taps=(target.num_layers,), draft_vocab_size=target.vocab_size)
    weights = dict(weights)
    weights.setdefault("embed_tokens.weight", target.embed_tokens)
    weights["lm_head.weight"] = target.lm_head
    return _assemble(name, layer, shape, weights, target), None


def _eagle3(
    name: str,
    layer: LlamaConfig,
    config: dict[str, Any],
    weights: Weights,
    target: TargetShape,
    target_hidden_size: int | None,
) -> tuple[EagleHead, torch.Tensor | None]:
    weights = dict(weights)
    taps = _taps(name, config, target)
    if "lm_head.weight" not in weights:
        raise CheckpointError(f"{name} is not a complete EAGLE-3 head: missing lm_head.weight")
    rows = len(weights["lm_head.weight"])
    if (declared := config.get("draft_vocab_size", rows)) != rows:
        raise CheckpointError(f"{name}: its config says draft_vocab_size = {declared}, its lm_head has {rows} rows")
    vocabulary = read_vocabulary(name, weights, rows, target.vocab_size)
    if target_hidden_size not in (None, target.hidden_size):
        raise CheckpointError(
            f"{name} is for a target with {target_hidden_size} hidden units, {target.name} has {target.hidden_size}"
        )
    if layer.hidden_size == target.hidden_size:
        weights.setdefault("embed_tokens.weight", target.embed_tokens)
    shape = EagleShape(
        version=3,
        target_hidden_size=target.hidden_size,
        taps=taps,
        draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
        fc_bias="fc.bias" in weights,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc=bool(config.get("norm_before_fc", False)),
        norm_per_tap=bool(config.get("fc_norm", False)),
        norm_output=bool(config.get("norm_output", False)),
    )
    return _assemble(name, layer, shape, weights, target), vocabulary


def _taps(name: str, config: dict[str, Any], target: TargetShape) -> tuple[int, ...]:
    usual = eagle3_taps(target.num_layers)
    nested = config.get("eagle_config") or {}
    declared = config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(declared) if declared else usual
    if not all(isinstance(tap, int) and 0 <= tap <= target.num_layers for tap in taps):
        raise CheckpointError(
            f"{name} reads the hidden states {taps}; {target.name} has those entering layers 0 to "
            f"{target.num_layers - 1}, and {target.num_layers} for the last one"
        )
    if taps != usual:
        logger.warning(
            "%s reads the hidden states entering layers %s, EAGLE-3 usually reads %s of %s; if little is accepted, "
            "its ids may count the states that leave a layer: then each belongs one higher",
            name,
            taps,
            usual,
            target.name,
        )
    return taps


def read_vocabulary(name: str, weights: Weights, size: int, vocab_size: int) -> torch.Tensor | None:
    """Take `d2t` and `t2d` out of `weights`: the target's id of each of the draft's `size` tokens, or None where both
    have the same vocabulary. Raises CheckpointError.

    `d2t` holds offsets: id = i + d2t[i].
    """
    offsets, known = weights.pop("d2t", None), weights.pop("t2d", None)
    if offsets is None:
        if size != vocab_size:
            raise CheckpointError(
                f"{name} has {size} logits for a vocabulary of {vocab_size} but no map d2t that says which; "
                f"without it every guess would be wrong"
            )
        return None
    if offsets.shape != (size,):
        raise CheckpointError(f"{name}: d2t has {tuple(offsets.shape)} entries, expected {size}")
    offsets = offsets.long()
    ids = torch.arange(size) + offsets
    ascending = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    marked = None if known is None else known.bool().nonzero().flatten()
    # Ids that never follow each other directly are no vocabulary that anybody chose; without t2d they look like
    # offsets all the same.
    absolute = bool((offsets[1:] > offsets[:-1]).all()) if marked is None else torch.equal(marked, offsets)
    agrees = not absolute if marked is None else torch.equal(marked, ids)
    if ascending and agrees and (size == vocab_size or bool(offsets.any())):
        return ids
    if absolute:
        reason = "it seems to hold absolute token ids; expected offsets, id = i + d2t[i]"
    elif not bool(offsets.any()):
        reason = "it is all zero, so the draft would know only the first tokens"
    elif not ascending:
        reason = f"its ids are not ascending numbers below {vocab_size}"
    else:
        reason = "its ids are not those that t2d marks"
    raise CheckpointError(f"{name}: d2t is wrong: {reason}")


def _assemble(name: str, layer: LlamaConfig, shape: EagleShape, weights: Weights, target: TargetShape) -> EagleHead:
    layer.vocab_size = target.vocab_size
    if shape.version == 1 and layer.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{name} has {layer.hidden_size} hidden units, {target.name} {target.hidden_size}; it is another target's"
        )
    head = EagleHead(layer, shape)
    expected = head.state_dict()
    missing, superfluous = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing or superfluous:
        raise CheckpointError(
            f"{name} is not a complete EAGLE-{shape.version} head: missing {_some(missing) or 'nothing'}; "
            f"unknown {_some(superfluous) or 'nothing'}"
        )
    for key, value in expected.items():
        if weights[key].shape != value.shape:
            raise CheckpointError(
                f"{name}: {key} is {tuple(weights[key].shape)}, expected {tuple(value.shape)} for {target.name}; "
                f"its config or its target is another"
            )
    head.load_state_dict(weights)
    return head


def _flag(name: str, config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and not isinstance(value, int):
        raise CheckpointError(f"{name}: {key} is {value!r}, expected a number")
    return value


def _renamed(key: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _some(names: Iterable[str]) -> str:
    """A few of many names, for messages."""
    ordered = sorted(names)
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")
