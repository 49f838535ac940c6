"""Which models can be exported exactly, and why the others are refused."""

import logging
from typing import Any

from specrun.engines.context import Context
from specrun.engines.errors import SpecrunError

logger = logging.getLogger(__name__)

# Each has a test that exports a tiny model of it and compares with PyTorch. Others are tried, with a
# warning: the validation after every export decides.
TESTED_FAMILIES = frozenset(
    [
        "cohere",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "opt",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    ]
)
# Frequencies that depend on the length of the sequence: one cache row would be valid at one length only.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class UnsupportedModelError(SpecrunError):
    """This model cannot be exported exactly."""


def require_family(config: Any) -> None:
    """Refuse what the graph contract cannot express, whatever the capacity.

    `config`: a transformers config. Raises UnsupportedModelError.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(config, "it is an encoder-decoder; only decoder-only language models are supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unsupported(config, "transformers has no causal language model for it")
    if getattr(config, "text_config", None) is not None:
        raise _unsupported(config, "it is multimodal; export its text model alone")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    architectures = getattr(config, "architectures", None) or [model_class.__name__]
    if architectures[0] != model_class.__name__:
        raise _unsupported(config, f"its architecture is {architectures[0]}; expected {model_class.__name__}")
    if model_class._is_stateful or (getattr(config, "layer_types", None) and not _attends_everywhere(config)):
        raise _unsupported(config, "it has recurrent, chunked or linear-attention layers, which cannot be rolled back")
    if not model_class._supports_attention_backend:
        raise _unsupported(config, "its class in transformers does not use the attention interface")
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and _method(quantization) != "gguf":
        raise _unsupported(config, f"it is quantized ({_method(quantization)}); give the unquantized checkpoint")
    if bad := LENGTH_DEPENDENT_ROPE & _rope_types(config):
        raise _unsupported(config, f"its rotary embedding ({', '.join(bad)}) changes with the length of the sequence")
    if config.model_type not in TESTED_FAMILIES:
        logger.warning("family %s is not among the tested ones; the validation after export decides", config.model_type)


def context_of(config: Any) -> Context:
    """How much context the model can use exactly."""
    return Context(positions=int(config.max_position_embeddings), window=_sliding_window(config))


def _sliding_window(config: Any) -> int | None:
    """The shortest attention window of any layer, or None where all layers see everything."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return int(window)


def _attends_everywhere(config: Any) -> bool:
    return set(config.layer_types) <= {"full_attention", "sliding_attention"}


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):  # one set per layer type
        nested = [value for value in parameters.values() if isinstance(value, dict)]
    else:
        nested = [parameters]
    return {str(value.get("rope_type", "default")) for value in nested}


def _method(quantization: Any) -> str:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(method, "value", method))


def _unsupported(config: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{config.model_type} cannot be exported: {reason}")
