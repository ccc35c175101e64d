"""Small models for tests, and the plainest way to run a decoder: one sequence, dense causal attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.engine.config import ModelConfig, parse_hf_config
from longtail.engine.model import Decoder, apply_rope, rms_norm

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def tiny_hf_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A ``config.json`` of a two-layer model with 4 query and 2 KV heads; ``changes`` are its own keys."""
    config = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "qwen3":
        config["head_dim"] = 16
    return config | changes


def tiny_config(family: str = "llama", **changes: Any) -> ModelConfig:
    """:func:`tiny_hf_config` as the engine sees it; for :func:`longtail.engine.random.random_model`."""
    return parse_hf_config(tiny_hf_config(family, **changes), where="tiny config")


class DenseAttention:
    """``Attend`` for a single sequence from position 0: a causal softmax over the whole prefix, differentiable."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __call__(self, layer: int, qkv_TE: Tensor, q_norm_H: Tensor | None, k_norm_H: Tensor | None) -> Tensor:
        c = self.model.config
        T, R = len(qkv_TE), c.heads_per_kv
        heads_TGNH = qkv_TE.view(T, c.kv_heads, R + 2, c.head_dim)
        q_TQH = heads_TGNH[:, :, :R].reshape(T, c.heads, c.head_dim)
        k_TGH, v_TGH = heads_TGNH[:, :, R], heads_TGNH[:, :, R + 1]
        if q_norm_H is not None and k_norm_H is not None:
            q_TQH, k_TGH = rms_norm(q_TQH, q_norm_H, c.rms_eps), rms_norm(k_TGH, k_norm_H, c.rms_eps)
        cos, sin = self.model.rope.upto(T)
        q_TQH, k_TGH = apply_rope(q_TQH, cos[:T], sin[:T]), apply_rope(k_TGH, cos[:T], sin[:T])
        k_TQH, v_TQH = k_TGH.repeat_interleave(R, dim=1), v_TGH.repeat_interleave(R, dim=1)
        scores_QTT = torch.einsum("tqh,sqh->qts", q_TQH, k_TQH) * c.head_dim**-0.5
        future = torch.ones(T, T, dtype=torch.bool, device=scores_QTT.device).triu(1)
        weights_QTT = scores_QTT.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("qts,sqh->tqh", weights_QTT, v_TQH).reshape(T, -1)


def reference_logits(model: Decoder, tokens: Tensor | list[int]) -> Tensor:
    """``[T, V]`` for one sequence, computed densely."""
    tokens_T = torch.as_tensor(tokens, dtype=torch.long, device=model.device)
    return model.logits(model(tokens_T, DenseAttention(model)))


def save_hf_model(folder: Path, hf: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32, **save: Any):
    """Save transformers' own model of a config and return it; weights are random, biases large, norms near 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 2.0 if name.endswith("bias") else 0.1
            values = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(1 + values if "norm" in name else values)
    model.save_pretrained(folder, **save)
    return model.eval()
