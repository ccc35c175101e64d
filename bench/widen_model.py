"""A small model for benches: a Llama of 30 million parameters with random weights, and SmolLM2's tokenizer.

19 of the 30 million are the embedding of SmolLM2's vocabulary, which is the output layer too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

VOCABULARY, HIDDEN, MLP, LAYERS = 49152, 384, 1024, 7
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 64
SPREAD = 0.03
"""Standard deviation of the weights."""


def write_small_model(folder: Path) -> None:
    """The model as a Hugging Face folder, which must not exist; the same weights every time."""
    from longtail.engine.models import resolve_model
    from longtail.engine.safetensors_io import Entry, write_json, write_safetensors

    folder.mkdir(parents=True)
    for path in resolve_model("smollm2-135m").iterdir():
        if path.name.startswith(("tokenizer", "generation_config")):
            shutil.copyfile(path, folder / path.name)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(0)

    def entry(name: str, *shape: int) -> Entry:
        def read() -> torch.Tensor:
            return torch.ones(shape) if len(shape) == 1 else SPREAD * torch.randn(shape, generator=generator)

        return Entry(f"model.{name}.weight", shape, torch.float32, read)

    entries = [entry("embed_tokens", VOCABULARY, HIDDEN), entry("norm", HIDDEN)]
    for layer in (f"layers.{i}" for i in range(LAYERS)):
        entries += [
            entry(f"{layer}.input_layernorm", HIDDEN),
            entry(f"{layer}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            entry(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            entry(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            entry(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            entry(f"{layer}.post_attention_layernorm", HIDDEN),
            entry(f"{layer}.mlp.gate_proj", MLP, HIDDEN),
            entry(f"{layer}.mlp.up_proj", MLP, HIDDEN),
            entry(f"{layer}.mlp.down_proj", HIDDEN, MLP),
        ]
    write_safetensors(folder / "model.safetensors", entries)
