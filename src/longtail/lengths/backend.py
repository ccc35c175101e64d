"""What ranks: the protocol of the ranker's backends, and which there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

import numpy as np

from longtail.core.errors import RankerError

BackendName = Literal["light", "encoder"]
WEIGHTS_FILE = "weights.safetensors"


class Backend(Protocol):
    """Maps prompts to scores; higher = longer. Deterministic, and defined for every string."""

    name: ClassVar[str]

    def score(self, prompts: Sequence[str]) -> np.ndarray:
        """float32 [n]; finite."""
        ...

    def save(self, folder: Path) -> list[Path]:
        """Write :data:`WEIGHTS_FILE` and what else is needed into a folder; which files these are. Raises
        ``RankerError``."""
        ...

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises ``RankerError`` naming the file that is missing or corrupt."""
        ...


def load_backend(name: str, folder: Path) -> Backend:
    """The backend of a saved ranker. The encoder imports torch, the light one does not."""
    loaders: dict[str, Callable[[Path], Backend]] = {"light": _load_light, "encoder": _load_encoder}
    if name not in loaders:
        raise RankerError(f"{folder}: backend {name!r} is unknown to this version; it knows {', '.join(loaders)}")
    return loaders[name](folder)


def _load_light(folder: Path) -> Backend:
    from longtail.lengths.light import LightBackend

    return LightBackend.load(folder)


def _load_encoder(folder: Path) -> Backend:
    from longtail.lengths.encoder import EncoderBackend

    return EncoderBackend.load(folder)
