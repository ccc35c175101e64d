"""Which safetensors files of a model folder hold which tensor. Nothing is ever written to the folder.

The files that count are, in this order: those that ``model.safetensors.index.json`` names, and no other;
``model.safetensors``; a complete set ``model-00001-of-0000N.safetensors``. A file that is missing, cut short or a
dangling link is an error that names it, even if the other files would do.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from longtail.core.errors import ModelError

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
FLOATS = ("F64", "F32", "BF16", "F16")


class Stored(NamedTuple):
    """One tensor on disk; ``dtype`` is safetensors' name for it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of one model folder, by name; only headers have been read."""

    folder: Path
    tensors: dict[str, Stored]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Each tensor in its stored type, on the CPU; files are opened one after another."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for path, group in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in group:
                    yield name, file.get_tensor(name)


def open_weights(folder: Path) -> WeightFiles:
    """Read the headers of a folder's weight files. Raises :class:`ModelError` naming the file at fault."""
    index = _read_index(folder)
    paths = [folder / name for name in _file_names(folder, index)]
    missing = [path.name for path in paths if not path.exists() and not path.is_symlink()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}{_named_by(index)}: download or copy the model again")
    tensors: dict[str, Stored] = {}
    for path in paths:
        for name, stored in _read_header(path).items():
            if index is not None and index.get(name, path.name) != path.name:
                continue
            if name in tensors:
                raise ModelError(f"{folder}: both {tensors[name].file.name} and {path.name} hold {name}")
            tensors[name] = stored
    for name, file in (index or {}).items():
        if name not in tensors:
            raise ModelError(f"{folder}: {INDEX} says that {file} holds {name}, but it does not")
    return WeightFiles(folder, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises :class:`ModelError` naming the file, or the target of a dangling link."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(_unreadable(path, error)) from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None if the folder has no index."""
    path = folder / INDEX
    if not path.exists() and not path.is_symlink():
        return None
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map")
    for file in set(weight_map.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{path} names the file {file!r}, which is not in this folder")
    return weight_map


def _file_names(folder: Path, index: dict[str, str] | None) -> list[str]:
    names = {path.name for path in folder.iterdir()}
    if index is not None:
        if SINGLE in names and SINGLE not in index.values():
            log.warning("%s: %s is ignored, because %s does not name it", folder, SINGLE, INDEX)
        return sorted(set(index.values()))
    if SINGLE in names:
        return [SINGLE]
    shards = [match for match in map(SHARD.fullmatch, sorted(names)) if match]
    counts = {int(match[2]) for match in shards}
    if len(counts) > 1:
        raise ModelError(f"{folder} holds shards of several models ({shards[0][0]}, {shards[-1][0]}) and no {INDEX}")
    if counts:
        (count,) = counts
        return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickled:
        raise ModelError(
            f"{folder} holds its weights as {pickled[0]}, and Longtail reads safetensors only: "
            "load it with transformers and save it again with save_pretrained"
        )
    raise ModelError(f"{folder} holds no weights: expected {SINGLE}, or shards with {INDEX}")


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return {name: Stored(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or cut short ({error}): download or copy it again") from error
    except OSError as error:
        raise ModelError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: OSError) -> str:
    if path.is_symlink() and not path.exists():
        return f"{path} is a link to {path.readlink()}, which does not exist"
    return f"cannot read {path}: {error.strerror or error}"


def _named_by(index: dict[str, str] | None) -> str:
    return f", named by {INDEX}" if index is not None else ""
