"""Describes a decoder as an architecture of Hugging Face transformers, without that library.

A decoder with QK-norm is an Apertus model, one without an Arcee model, both with GELU: RMSNorm before each layer, RoPE
over halves of a head, a feed-forward layer without a gate, no biases. Qwen3 has a gate, which no weights can undo.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.settings.model_presets import ModelConfig
from atoll.train.model.decoder import NORM_EPS


def misfit(config: ModelConfig) -> str | None:
    """Return why no architecture of transformers fits a decoder; None if one does."""
    if not config.qk_norm and config.width % config.heads:
        need = f"width ({config.width}) must be a multiple of heads ({config.heads})"
        return f"without QK-norm the decoder is an Arcee model, whose {need}; set qk_norm = true or change one of them"
    return None


def describe(config: ModelConfig, dtype: torch.dtype, end: int) -> dict[str, Any]:
    """Return the config.json of a decoder that `misfit` finds nothing against.

    Args:
        config: The decoder's shape.
        dtype: The dtype of its parameters.
        end: The token between documents.
    """
    kind = "Apertus" if config.qk_norm else "Arcee"
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_width,
        "intermediate_size": config.feedforward,
        "hidden_act": "gelu_pytorch_tanh",
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,  # a padding token's embedding would get no gradient
    }


def to_architecture(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a decoder's parameters under the architecture's names, as views."""
    return {
        name: part
        for ours, theirs in _names(config).items()
        for name, part in zip(theirs, tensors[ours].chunk(len(theirs)), strict=True)
    }


def from_architecture(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters under a decoder's names; those that are missing, or whose parts do not fit, are left out."""
    found = {}
    for ours, theirs in _names(config).items():
        parts = [tensors[name] for name in theirs if name in tensors]
        if len(parts) == len(theirs) and len({(part.dtype, part.shape) for part in parts}) == 1:
            found[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return found


def _names(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of each parameter of a decoder: in the decoder, and of its parts in the architecture."""
    norms = ("attention_layernorm", "feedforward_layernorm")
    if not config.qk_norm:
        norms = ("input_layernorm", "post_attention_layernorm")
    parts: dict[str, tuple[str, ...]] = {
        "attention_norm": (norms[0],),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention_out": ("self_attn.o_proj",),
        "feedforward_norm": (norms[1],),
        "feedforward_in": ("mlp.up_proj",),
        "feedforward_out": ("mlp.down_proj",),
    }
    if config.qk_norm:
        parts |= {"query_norm": ("self_attn.q_norm",), "key_norm": ("self_attn.k_norm",)}
    names: dict[str, tuple[str, ...]] = {"embedding": ("model.embed_tokens",), "norm": ("model.norm",)}
    if not config.tied:
        names["head"] = ("lm_head",)
    for block in range(config.layers):
        for ours, theirs in parts.items():
            names[f"blocks.{block}.{ours}"] = tuple(f"model.layers.{block}.{name}" for name in theirs)
    return {f"{ours}.weight": tuple(f"{name}.weight" for name in theirs) for ours, theirs in names.items()}
