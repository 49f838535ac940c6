"""EAGLE draft heads: one decoder layer that reads, beside each token, what the target felt when it chose it.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024; "EAGLE-2: Faster Inference of
Language Models with Dynamic Draft Trees", 2024; "EAGLE-3: Scaling up Inference Acceleration of Large Language Models
via Training-Time Test", 2025. EAGLE-1 and EAGLE-2 share their checkpoints; EAGLE-2 is a way to draft trees.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


@dataclass(frozen=True)
class EagleShape:
    """What a checkpoint says about the head, beyond the layer's own config."""

    version: int  # 1 (also for EAGLE-2) or 3
    target_hidden_size: int
    taps: tuple[int, ...]
    draft_vocab_size: int
    fc_bias: bool = False
    norm_before_residual: bool = False  # EAGLE-3: the residual is taken after hidden_norm
    norm_before_fc: bool = False  # EAGLE-3: RMSNorm over the joined taps
    norm_per_tap: bool = False  # EAGLE-3: one for each tap
    norm_output: bool = False  # EAGLE-3: the next feature is the normed state
    layernorms: bool = False  # EAGLE-1: norms before fc, before the attention and before the head


class EagleHead(torch.nn.Module):
    """The head, with the parameter names of published checkpoints.

    A call reads tokens [batch, tokens] and features [batch, tokens, hidden]: the fused states of the target for the
    position before each token, or, while drafting, the head's own output for it. It returns logits over the draft's
    vocabulary and the state that is the next feature.
    """

    def __init__(self, config: LlamaConfig, shape: EagleShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        hidden, joined = config.hidden_size, len(shape.taps) * shape.target_hidden_size
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, hidden)
        self.lm_head = torch.nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        if shape.version == 3:
            self.fc = torch.nn.Linear(joined, hidden, bias=shape.fc_bias)
            self.midlayer = _Layer(config, joined=True, first_norm=True)
            if shape.norm_before_fc:
                self.input_norm = LlamaRMSNorm(joined, config.rms_norm_eps)
            if shape.norm_per_tap:
                self.fc_norm = torch.nn.ModuleList(
                    LlamaRMSNorm(shape.target_hidden_size, config.rms_norm_eps) for _ in shape.taps
                )
        else:
            self.fc = torch.nn.Linear(2 * hidden, hidden, bias=shape.fc_bias)
            self.layers = torch.nn.ModuleList([_Layer(config, joined=False, first_norm=shape.layernorms)])
            if shape.layernorms:
                self.embed_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        if self.has_final_norm:
            self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    @property
    def has_final_norm(self) -> bool:
        return self.shape.version == 3 or self.shape.layernorms

    @property
    def layer(self) -> "_Layer":
        found = self.midlayer if self.shape.version == 3 else self.layers[0]
        assert isinstance(found, _Layer)
        return found

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Features [..., hidden] out of the target's tapped states [..., taps * target_hidden]."""
        if self.shape.version != 3:
            return states
        if self.shape.norm_before_fc:
            states = self.input_norm(states)
        if self.shape.norm_per_tap:
            parts = torch.split(states, self.shape.target_hidden_size, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)  # type: ignore[no-any-return] # modules return Any

    def states(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """The head's own features [batch, tokens, hidden]. attention_mask bool [batch or 1, 1, tokens, cache rows]."""
        embedded = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(embedded, position_ids)
        layer = self.layer
        if self.shape.version == 3:
            normed = layer.hidden_norm(features)
            residual = normed if self.shape.norm_before_residual else features
            inputs = torch.cat([layer.input_layernorm(embedded), normed], -1)
        else:
            if self.shape.layernorms:
                embedded = self.embed_norm(embedded)
            residual = self.fc(torch.cat([embedded, features], -1))
            inputs = layer.input_layernorm(residual) if self.shape.layernorms else residual
        out = layer(inputs, residual, rotary, attention_mask, cache)
        return self.norm(out) if self.shape.norm_output else out  # type: ignore[no-any-return] # modules return Any

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., draft vocabulary]."""
        if self.has_final_norm and not self.shape.norm_output:
            states = self.norm(states)
        return self.lm_head(states)  # type: ignore[no-any-return] # modules return Any


class _Layer(torch.nn.Module):
    """A Llama decoder layer; `joined`: its attention reads tokens and features side by side."""

    def __init__(self, config: LlamaConfig, joined: bool, first_norm: bool) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        if joined:
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(self.self_attn, name)
                wide = torch.nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None)
                setattr(self.self_attn, name, wide)
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if first_norm:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        inputs: torch.Tensor,
        residual: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            hidden_states=inputs, position_embeddings=rotary, attention_mask=attention_mask, cache=cache
        )
        hidden = residual + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return] # modules return Any
