"""Checkpoints of a pipeline: folders that are either complete or not there.

``ROOT/step-000012/`` holds the weights as a Hugging Face model folder, the optimizer as one file per worker, and
``state.json``: what the controller needs to go on, and the name and size of every other file. A checkpoint is
written as ``ROOT/.step-000012.partial`` by all workers and renamed when all files are on disk, so a folder named
``step-*`` was complete once; :func:`latest` finds out if it still is.

The controller calls :func:`begin`, each worker :func:`write_optimizer_shard` (and worker 0 :func:`write_weights`),
then the controller :func:`publish`. All raise :class:`CheckpointError` when the disk is full or read-only; nothing is
published then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from longtail.core.errors import CheckpointError
from longtail.engine.checkpoint import export_model
from longtail.engine.model import Decoder
from longtail.engine.safetensors_io import Entry, write_json, write_safetensors
from longtail.rl.optim import OptimizerState
from longtail.rl.trainer import Trainer

SCHEMA = 1
STATE = "state.json"
NAME = re.compile(r"step-(\d{6,})")
SHARD = re.compile(r"optimizer-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint: its folder, how many steps were done, and what the controller stored.

    ``path`` is None, ``step`` 0 and ``state`` empty if there is none. ``skipped`` has a phrase for each newer
    folder that is not complete: its name, and why.
    """

    path: Path | None
    step: int
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()


def begin(root: Path, step: int) -> Path:
    """An empty folder for the files of the checkpoint after ``step`` steps; removes leftovers of unfinished ones."""
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".step-*"):
            shutil.rmtree(leftover)
        folder = root / f".step-{step:06d}.partial"
        folder.mkdir()
        return folder


def write_weights(folder: Path, model: Decoder, *, source: Path) -> int:
    """Write the model with config and tokenizer (from the model folder ``source``); returns bytes written.

    Raises :class:`CheckpointError` also if the checkpoint was given up meanwhile.
    """
    if not folder.is_dir():
        raise CheckpointError(f"cannot write the checkpoint {folder}: the folder is gone")
    export_model(model, folder, source=source)
    with _explained(folder):
        return sum(p.stat().st_size for p in folder.iterdir() if not SHARD.fullmatch(p.name))


def write_optimizer_shard(folder: Path, trainer: Trainer) -> int:
    """Write this rank's optimizer state; returns bytes written."""
    state = trainer.optimizer_state()
    path = folder / f"optimizer-{trainer.rank}-of-{trainer.world}.safetensors"
    fields = {name: str(getattr(state, name)) for name in ("start", "end", "total", "updates", "layout")}
    entries = [Entry(name, tuple(t.shape), t.dtype, lambda t=t: t) for name, t in state.tensors.items()]  # type: ignore[misc]
    write_safetensors(path, entries, metadata=fields)
    with _explained(path):
        return path.stat().st_size


def publish(folder: Path, state: dict[str, Any], *, keep: int) -> Path:
    """Make the checkpoint in ``folder`` (from :func:`begin`) visible at once, and delete all but the newest ``keep``.

    ``state`` is stored as JSON. Raises :class:`CheckpointError`, publishing nothing, if a file is missing.
    """
    root = folder.parent
    target = root / folder.name.removeprefix(".").removesuffix(".partial")
    with _explained(folder):
        _require_parts({p.name for p in folder.iterdir()}, where=folder)
        sizes = {}
        for path in sorted(folder.iterdir()):
            _sync(path)
            sizes[path.name] = path.stat().st_size
        write_json(folder / STATE, {"schema": SCHEMA, "files": sizes, "state": state})
        _sync(folder)
        if target.exists():
            target.rename(root / f"{folder.name}.old")
        folder.rename(target)
        _sync(root)
    _prune(root, keep)
    return target


def discard(folder: Path) -> None:
    """Remove what there is of an unfinished checkpoint. What a worker still writes to it goes with :func:`begin`."""
    shutil.rmtree(folder, ignore_errors=True)


def latest(root: Path) -> Found:
    """The newest complete checkpoint under ``root``, which need not exist."""
    skipped: list[str] = []
    for path in _newest_first(root):
        try:
            return Found(path, _step(path), read_state(path), tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    return Found(None, 0, {}, tuple(skipped))


def read_state(path: Path) -> dict[str, Any]:
    """What the controller stored in a checkpoint. Raises :class:`CheckpointError` if the checkpoint is not complete."""
    if path.is_symlink():
        raise CheckpointError(f"{path.name} is a symbolic link, not a checkpoint folder")
    record = _read_record(path)
    _require_parts(set(record["files"]), where=path)
    for name, size in record["files"].items():
        try:
            found = (path / name).lstat()
        except OSError:
            raise CheckpointError(f"{path.name} lacks the file {name}") from None
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            raise CheckpointError(f"{path.name} is damaged: {name} has {found.st_size} bytes instead of {size}")
    return record["state"]


def load_optimizer(trainer: Trainer, path: Path) -> None:
    """Load this rank's part of the optimizer state of a checkpoint that any number of workers wrote.

    Load the weights first. Raises :class:`CheckpointError` if the files do not fit together or to the model.
    """
    start, end = trainer.bounds[trainer.rank]
    trainer.load_optimizer_state(read_optimizer(path, start=start, end=end))


def read_optimizer(path: Path, *, start: int, end: int) -> OptimizerState:
    """Elements ``start .. end`` of the optimizer state, put together from the shards that hold them."""
    parts: list[tuple[int, dict[str, torch.Tensor]]] = []
    labels: set[tuple[int, int, str]] = set()
    for shard in path.iterdir():
        if not SHARD.fullmatch(shard.name):
            continue
        try:
            with safe_open(shard, framework="pt") as file:
                label = file.metadata()
                labels.add((int(label["total"]), int(label["updates"]), label["layout"]))
                first, last = int(label["start"]), int(label["end"])
                here = slice(max(first, start) - first, min(last, end) - first)
                if here.start < here.stop:
                    names = file.keys()
                    parts.append((first, {name: file.get_slice(name)[here] for name in names}))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"cannot read {shard}: {error}") from error
    if len(labels) != 1:
        raise CheckpointError(f"the optimizer files in {path} are of {len(labels)} different states, not of one")
    ((total, updates, layout),) = labels
    parts.sort(key=lambda part: part[0])
    names = parts[0][1].keys() if parts else ("exp_avg", "exp_avg_sq")
    tensors = {name: torch.cat([part[name] for _, part in parts] or [torch.empty(0)]) for name in names}
    if any(len(t) != end - start for t in tensors.values()):
        raise CheckpointError(f"the optimizer files in {path} do not hold all of the elements {start} to {end}")
    return OptimizerState(start=start, end=end, total=total, updates=updates, layout=layout, tensors=tensors)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / STATE).read_bytes())
        files, _ = record["files"], record["state"]
        if not isinstance(files, dict) or record["schema"] != SCHEMA:
            raise ValueError(f"schema {record['schema']!r} instead of {SCHEMA}")
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} has no {STATE}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} is damaged: cannot use {STATE} ({error})") from None
    return record


def _require_parts(names: set[str], *, where: Path) -> None:
    """Config, weights and every optimizer shard; raises :class:`CheckpointError` naming the first that is missing."""
    shards = {tuple(map(int, match.groups())) for name in names if (match := SHARD.fullmatch(name))}
    world = max((world for _, world in shards), default=1)
    wanted = ["config.json", *(f"optimizer-{r}-of-{world}.safetensors" for r in range(world))]
    for name in wanted:
        if name not in names:
            raise CheckpointError(f"{where.name} lacks the file {name}")
    if not any(name.startswith("model") and name.endswith(".safetensors") for name in names):
        raise CheckpointError(f"{where.name} lacks the weights (model.safetensors)")


def _newest_first(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if NAME.fullmatch(p.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _prune(root: Path, keep: int) -> None:
    """Delete checkpoints older than the newest ``keep`` complete ones; a failure to delete harms nobody."""
    complete = 0
    for path in _newest_first(root):
        if complete >= keep and not path.is_symlink():
            with contextlib.suppress(OSError):
                # Hidden first, so that a half-deleted folder is never taken for a checkpoint.
                trash = path.rename(root / f".{path.name}.old")
                shutil.rmtree(trash)
        with contextlib.suppress(CheckpointError):
            complete += complete < keep and read_state(path) is not None
    for old in root.glob(".step-*.old"):
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"cannot write the checkpoint {where}: {error.strerror or error}") from error
