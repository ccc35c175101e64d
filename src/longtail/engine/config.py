"""The architecture of a decoder, as the Llama, Qwen2 and Qwen3 families vary it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from longtail.core.errors import ModelError

SUPPORTED = "Longtail runs dense decoders of the Llama, Qwen2 and Qwen3 families"
FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    ``heads`` query heads share ``kv_heads`` KV heads, ``heads_per_kv`` each. ``head_dim`` is independent of
    ``hidden_size / heads`` (Qwen3). ``rope_parameters`` is the dict of the same name in a transformers config
    (``rope_type``, ``rope_theta``, scaling factors). ``hf`` is the whole original config, written back on export.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    max_context: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads

    @property
    def qkv_rows_per_kv(self) -> int:
        """Rows of the fused QKV weight that belong to one KV head: its query heads, then K, then V."""
        return (self.heads_per_kv + 2) * self.head_dim

    @property
    def mlp_block(self) -> int:
        """Rows of one gate (or up) block in the fused gate/up weight: the largest power of two, at most 64,
        that divides ``intermediate_size``."""
        return min(64, self.intermediate_size & -self.intermediate_size)


def parse_hf_config(hf: dict[str, Any], *, where: str) -> ModelConfig:
    """The architecture that a ``config.json`` describes, with every omitted key as transformers reads it.

    Both spellings of RoPE are accepted: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.
    ``where`` (the file) starts each message. Raises :class:`ModelError` naming the family or feature that is not
    supported, or the value that cannot be.
    """
    from transformers import AutoConfig

    reason = _unsupported(hf)
    if reason:
        raise ModelError(f"{where}: {reason}; {SUPPORTED}.")
    try:
        c = AutoConfig.for_model(**copy.deepcopy(hf))  # reads RoPE dicts in place
        config = ModelConfig(
            family=hf["model_type"],
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            layers=c.num_hidden_layers,
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            intermediate_size=c.intermediate_size,
            rms_eps=c.rms_norm_eps,
            max_context=c.max_position_embeddings,
            tied=c.tie_word_embeddings,
            qkv_bias=hf["model_type"] == "qwen2" or c.attention_bias,
            o_bias=hf["model_type"] != "qwen2" and c.attention_bias,
            mlp_bias=hf["model_type"] == "llama" and c.mlp_bias,
            qk_norm=hf["model_type"] == "qwen3",
            rope_parameters=dict(c.rope_parameters),
            hf=hf,
        )
    except Exception as error:  # transformers raises many kinds for values that it cannot read
        raise ModelError(f"{where}: not a readable model configuration: {_one_line(error)}") from error
    _check(config, where)
    return config


def _unsupported(hf: dict[str, Any]) -> str | None:
    """Why this model cannot run, as the beginning of a sentence, or None."""
    family = hf.get("model_type")
    if not isinstance(family, str):
        return "the key model_type is missing"
    if family not in FAMILIES:
        return f"the model family {family!r} is not supported"
    architectures = hf.get("architectures") or []
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        return f"{architectures[0]} is not a causal language model"
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unknown")
        return f"quantised weights ({method}) are not supported, use the unquantised model"
    windowed = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
    beyond = hf.get("max_window_layers", 28) < hf.get("num_hidden_layers", 32)
    layer_types = hf.get("layer_types") or (["sliding_attention"] if windowed and beyond else [])
    if family != "llama" and any(kind != "full_attention" for kind in layer_types):
        return "sliding-window attention is not supported"
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"the activation {hf['hidden_act']!r} is not supported (only silu)"
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "RoPE that differs between layers is not supported"
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        return f"RoPE of type {kind!r} is not supported (only {', '.join(ROPE_TYPES)})"
    if (rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0) != 1.0:
        return "RoPE over a part of each head (partial_rotary_factor) is not supported"
    return None


def _check(config: ModelConfig, where: str) -> None:
    sizes = ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size", "max_context")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ModelError(f"{where}: {name} = {getattr(config, name)} must be at least 1")
    if config.heads % config.kv_heads:
        raise ModelError(
            f"{where}: {config.heads} attention heads cannot share {config.kv_heads} KV heads evenly, "
            "num_attention_heads must be a multiple of num_key_value_heads"
        )
    if config.head_dim % 2:
        raise ModelError(f"{where}: head_dim = {config.head_dim} must be even, because RoPE rotates pairs")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
