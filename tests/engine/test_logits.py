"""Our decoder against transformers' own on the same folder."""

from __future__ import annotations

import pytest
import torch

from engine.reference import (
    LINEAR_ROPE,
    LLAMA3_ROPE,
    YARN_ROPE,
    reference_logits,
    save_hf_model,
    tiny_config,
    tiny_hf_config,
)
from longtail.engine.checkpoint import export_model, load_model
from longtail.engine.random import random_model

MHA = {"num_key_value_heads": 4}
UNTIED = {"tie_word_embeddings": False}
VARIANTS = {
    "llama gqa tied": ("llama", {}),
    "llama mha untied": ("llama", MHA | UNTIED),
    "llama attention bias": ("llama", {"attention_bias": True}),
    "llama attention and mlp bias, untied": ("llama", {"attention_bias": True, "mlp_bias": True} | UNTIED),
    "llama head_dim that is not hidden / heads": ("llama", {"head_dim": 32}),
    "llama 3 query heads per kv head": ("llama", {"num_attention_heads": 6, "head_dim": 16}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama odd mlp size": ("llama", {"intermediate_size": 75}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "qwen2 gqa tied": ("qwen2", {}),
    "qwen2 mha untied": ("qwen2", MHA | UNTIED),
    "qwen2 yarn rope with attention factor": ("qwen2", {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.3}}),
    "qwen3 gqa tied": ("qwen3", {}),
    "qwen3 mha untied": ("qwen3", MHA | UNTIED),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3 hidden 64, head_dim 32": ("qwen3", {"hidden_size": 64, "head_dim": 32}),
    "qwen3 llama3 rope": ("qwen3", {"rope_parameters": LLAMA3_ROPE}),
}


@pytest.fixture
def exact_transformers(monkeypatch):
    """transformers computes RMSNorm statistics in float32 whatever the model's type; for a float64 comparison it must
    not. (Its SDPA attention keeps float64; its eager attention would take the softmax in float32.)"""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)

    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def some_tokens(vocab: int = 96, count: int = 150) -> torch.Tensor:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def largest_difference(model, hf_model, tokens) -> float:
    ours, theirs = reference_logits(model, tokens), hf_model(tokens[None]).logits[0]
    assert ours.dtype == theirs.dtype
    assert theirs.std() > 0.1
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers_in_float32(family, changes, tmp_path):
    hf_model = save_hf_model(tmp_path, tiny_hf_config(family, **changes))
    model = load_model(tmp_path, dtype=torch.float32)
    assert largest_difference(model, hf_model, some_tokens()) <= 1e-4


@pytest.mark.parametrize(("family", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_transformers_in_float64(family, changes, tmp_path, exact_transformers):
    hf_model = save_hf_model(tmp_path, tiny_hf_config(family, **changes), dtype=torch.float64)
    model = load_model(tmp_path, dtype=torch.float64)
    assert largest_difference(model, hf_model, some_tokens()) <= 1e-9


@pytest.mark.parametrize("rope_scaling", [None, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE], ids=str)
def test_the_older_spelling_of_rope_in_config_json_gives_the_same_logits(rope_scaling, tmp_path):
    import json

    hf_model = save_hf_model(tmp_path, tiny_hf_config(rope_parameters=rope_scaling or {"rope_theta": 10000.0}))
    path = tmp_path / "config.json"
    old = json.loads(path.read_text())
    del old["rope_parameters"]
    old["rope_theta"] = 10000.0
    if rope_scaling is not None:
        scaling = {key: value for key, value in rope_scaling.items() if key not in ("rope_type", "rope_theta")}
        old["rope_scaling"] = {"type": rope_scaling["rope_type"], **scaling}
    path.write_text(json.dumps(old))
    assert largest_difference(load_model(tmp_path, dtype=torch.float32), hf_model, some_tokens()) <= 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_random_model_gives_equal_logits_in_transformers(family, tied, tmp_path):

    from transformers import AutoModelForCausalLM

    model = random_model(tiny_config(family, tie_word_embeddings=tied), seed=3, std=0.1)
    (tmp_path / "source").mkdir()
    export_model(model, tmp_path / "model", source=tmp_path / "source")
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (hf_model.lm_head.weight is hf_model.model.embed_tokens.weight) == tied
    assert largest_difference(model, hf_model, some_tokens()) <= 1e-4


def test_rope_tables_first_filled_by_the_sampler_serve_training_too(tmp_path):

    model = random_model(tiny_config(), seed=0)
    with torch.inference_mode():
        reference_logits(model, some_tokens())
    reference_logits(model, some_tokens()).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
