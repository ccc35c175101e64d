"""Hugging Face model folders: loading one into a :class:`Decoder` and writing one back.

Every tensor of a checkpoint corresponds to a *view* of one (fused) parameter, so that loading copies each tensor
once into place and exporting reads each back bit for bit, one at a time.

Whether the head is tied follows transformers: a tied model may lack ``lm_head.weight``, or hold an equal copy; if it
holds a different one, the two are not tied (with a warning). An untied model must hold its own.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from longtail.core.errors import CheckpointError, ModelError
from longtail.engine.config import ModelConfig, parse_hf_config
from longtail.engine.layout import split_gate_up, split_qkv
from longtail.engine.model import Decoder, Layer
from longtail.engine.safetensors_io import Entry, write_json, write_safetensors
from longtail.engine.weightfiles import FLOATS, INDEX, SINGLE, WeightFiles, open_weights, read_json

log = logging.getLogger(__name__)

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
)
"""Files that an export takes over from the folder which the model came from."""


class Slot(NamedTuple):
    """Where one Hugging Face tensor of ``shape`` lives: ``view`` has as many elements, in the same order."""

    view: Tensor
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor as Hugging Face stores it; a copy where its elements are not adjacent."""
        return self.view.detach().reshape(self.shape)


def read_config(folder: Path) -> ModelConfig:
    """The architecture in ``folder/config.json``. Raises :class:`ModelError`."""
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    path = folder / "config.json"
    if not path.exists() and not path.is_symlink():
        raise ModelError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    return parse_hf_config(read_json(path), where=str(path))


def check_model(folder: Path) -> ModelConfig:
    """:func:`read_config`, and the check that the weight files hold every tensor in the right shape (headers only)."""
    config = read_config(folder)
    files = open_weights(folder)
    config = _with_stored_head(config, files)
    _check_tensors(config, files, hf_slots(Decoder(config, device="meta")))
    return config


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """The model of a folder, its weights cast to ``dtype``.

    Raises :class:`ModelError` naming the file or tensor that is unsupported, missing, damaged or of a wrong shape.
    """
    config = read_config(folder)
    files = open_weights(folder)
    model = Decoder(_with_stored_head(config, files), dtype=dtype, device=device)
    _fill(model, files)
    return model


def load_weights(model: Decoder, folder: Path) -> None:
    """Overwrite a model's weights, in place, by those of a folder of the same architecture.

    Raises :class:`ModelError` like :func:`load_model`, before it changes any weight unless reading itself fails.
    """
    files = open_weights(folder)
    stored = _with_stored_head(read_config(folder), files)
    for field in dataclasses.fields(ModelConfig):
        old, new = getattr(model.config, field.name), getattr(stored, field.name)
        if field.name not in ("hf", "max_context") and old != new:
            raise ModelError(f"{folder} is another architecture: its {field.name} is {new!r}, the model's is {old!r}")
    _fill(model, files)


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model, a tied head counted once; allocates nothing."""
    return sum(parameter.numel() for parameter in Decoder(config, device="meta").parameters())


def export_model(model: Decoder, folder: Path, *, source: Path, max_shard_bytes: int = 5 << 30) -> None:
    """Write the model as a Hugging Face folder that transformers loads; every file is flushed to disk.

    ``source`` is the folder that the model was loaded from: its tokenizer and generation files are copied. ``folder``
    is made if need be; making it appear at once is the caller's part. Raises :class:`CheckpointError` naming the file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _copy_companions(source, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    dtype = str(model.dtype).removeprefix("torch.")
    hf = {"architectures": [f"{model.config.family.capitalize()}ForCausalLM"], **model.config.hf}
    hf |= {"tie_word_embeddings": model.config.tied, "dtype": dtype}
    if "torch_dtype" in hf:
        hf["torch_dtype"] = dtype
    write_json(folder / "config.json", hf)
    _write_weights(model, folder, max_shard_bytes)


def hf_slots(model: Decoder) -> dict[str, Slot]:
    """The Hugging Face name of every tensor of the model, with its place in the fused parameters."""
    slots = {EMBED: Slot(model.embed, tuple(model.embed.shape))}
    for i, layer in enumerate(cast("list[Layer]", model.layers)):
        for name, view in _layer_views(layer, model.config):
            rows = view.shape[:-1] if name.endswith("proj.weight") else view.shape
            columns = view.shape[len(rows) :]
            slots[f"model.layers.{i}.{name}"] = Slot(view, (rows.numel(), *columns))
    slots["model.norm.weight"] = Slot(model.norm, tuple(model.norm.shape))
    if not model.config.tied:
        slots[HEAD] = Slot(model.head, tuple(model.head.shape))
    return slots


def _layer_views(layer: Layer, c: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Names within a layer, and views whose leading dimensions flatten to the tensor's rows."""
    yield "input_layernorm.weight", layer.attn_norm
    for kind, qkv, o in (("weight", layer.qkv, layer.o), ("bias", layer.qkv_bias, layer.o_bias)):
        if qkv is not None:
            parts = split_qkv(qkv, c)
            yield f"self_attn.q_proj.{kind}", parts.q
            yield f"self_attn.k_proj.{kind}", parts.k
            yield f"self_attn.v_proj.{kind}", parts.v
        if o is not None:
            yield f"self_attn.o_proj.{kind}", o
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    for kind, gate_up, down in (("weight", layer.gate_up, layer.down), ("bias", layer.gate_up_bias, layer.down_bias)):
        if gate_up is not None and down is not None:
            gate, up = split_gate_up(gate_up, c)
            yield f"mlp.gate_proj.{kind}", gate
            yield f"mlp.up_proj.{kind}", up
            yield f"mlp.down_proj.{kind}", down


def _with_stored_head(config: ModelConfig, files: WeightFiles) -> ModelConfig:
    """The config, untied if the files hold an embedding and a head with different values."""
    if not config.tied or EMBED not in files.tensors or HEAD not in files.tensors:
        return config
    values = dict(files.read([EMBED, HEAD]))
    if torch.equal(values[EMBED], values[HEAD]):
        return config
    log.warning(
        "%s: config.json ties the head to the embedding, but %s differs from %s: they are used untied, "
        "set tie_word_embeddings to false",
        files.folder,
        HEAD,
        EMBED,
    )
    return dataclasses.replace(config, tied=False, hf={**config.hf, "tie_word_embeddings": False})


@torch.no_grad()
def _fill(model: Decoder, files: WeightFiles) -> None:
    slots = hf_slots(model)
    sources = _check_tensors(model.config, files, slots)
    for name, tensor in files.read(sources):
        view = slots[sources[name]].view
        view.copy_(tensor.view(view.shape))


def _check_tensors(config: ModelConfig, files: WeightFiles, slots: dict[str, Slot]) -> dict[str, str]:
    """Stored name -> slot name, for every slot once. Raises :class:`ModelError`; warns of tensors without a use."""
    sources = {name: name for name in slots}
    if config.tied and EMBED not in files.tensors and HEAD in files.tensors:
        sources = {HEAD: EMBED, **{name: name for name in slots if name != EMBED}}
    missing = [name for name in sources if name not in files.tensors]
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        hint = ", although config.json says that the head is not tied" if missing == [HEAD] else ""
        raise ModelError(f"{files.folder}: the weight files lack {missing[0]}{more}{hint}")
    for name, slot in sources.items():
        stored = files.tensors[name]
        if stored.shape != slots[slot].shape:
            raise ModelError(
                f"{stored.file}: {name} has shape {list(stored.shape)}, but config.json wants {list(slots[slot].shape)}"
            )
        if stored.dtype not in FLOATS:
            raise ModelError(f"{stored.file}: {name} is of type {stored.dtype}; use the unquantised model")
    unused = [n for n in files.tensors if n not in sources and n != HEAD and not n.endswith("rotary_emb.inv_freq")]
    if unused:
        log.warning("%s: %d tensors are not used: %s", files.folder, len(unused), ", ".join(unused[:3]))
    return sources


def _write_weights(model: Decoder, folder: Path, max_shard_bytes: int) -> None:
    entries = [Entry(name, slot.shape, model.dtype, slot.read) for name, slot in hf_slots(model).items()]
    shards = list(_shards(entries, max_shard_bytes))
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, entries)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, shard)
        weight_map |= {entry.name: file for entry in shard}
    total = sum(entry.size_bytes for entry in entries)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(entries: Iterable[Entry], max_shard_bytes: int) -> Iterator[list[Entry]]:
    """Consecutive groups of at most ``max_shard_bytes``, or of one tensor that is larger."""
    shard: list[Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.size_bytes > max_shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.size_bytes
    yield shard


def _copy_companions(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in COMPANIONS):
            target = folder / path.name
            shutil.copyfile(path, target)
            with target.open("rb+") as file:
                os.fsync(file.fileno())
