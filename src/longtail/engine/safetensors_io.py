"""Writing the files of a model folder, each flushed to disk before the call returns.

Tensors are written one at a time, so that saving a model needs no second copy of it in memory. The safetensors
format: the header's length as a little-endian uint64, a JSON header (name -> dtype, shape, byte range after the
header), then the tensors' bytes in the order of their ranges. Reading is left to the ``safetensors`` library.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longtail.core.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


class Entry(NamedTuple):
    """One tensor of a file; ``read`` makes it when its turn comes: any device, ``shape`` and ``dtype`` as stated."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, entries: Sequence[Entry], *, metadata: dict[str, str] | None = None) -> None:
    """Write ``entries`` to ``path`` and flush it to disk. Raises :class:`CheckpointError` naming the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.size_bytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for entry in entries:
                tensor = entry.read().detach().to("cpu", entry.dtype).contiguous()
                if tuple(tensor.shape) != entry.shape:
                    raise ValueError(f"{entry.name}: shape {tuple(tensor.shape)} instead of {entry.shape}")
                file.write(tensor.flatten().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value``, indented, and flush it to disk. Raises :class:`CheckpointError` naming the file."""
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
