"""Predicts, from prompts alone, which responses will be long.

    ranker = Ranker.load()                            # ships with the package
    ranker.score(["hi", "write a compiler"])          # float32 [2], higher = longer
    ranker.quantile(["hi", "write a compiler"])       # where each stands among ordinary prompts, 0 to 1

A saved ranker is a folder: ``ranker.json`` (format, backend, calibration, model card, a digest of every other file) and
the backend's files. Nothing in it is code, nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.errors import RankerError
from longtail.lengths.backend import Backend, load_backend

FORMAT = 1
RANKER_FILE = "ranker.json"
SHIPPED = Path(__file__).parent.parent / "data" / "ranker" / "default"
KNOTS = 101


class Ranker:
    """A backend with the calibration of its scores and a model card.

    ``knots`` float64 [k], ascending: the i-th is the score below which a share i / (k - 1) of ordinary prompts lie.
    ``card`` is free-form JSON: data, metrics, unit, objective.
    """

    def __init__(self, backend: Backend, knots: np.ndarray, card: dict[str, Any] | None = None) -> None:
        if knots.ndim != 1 or len(knots) < 2 or not np.isfinite(knots).all() or (np.diff(knots) < 0).any():
            raise RankerError("a ranker's calibration must be at least two finite, ascending scores")
        self.backend = backend
        self.knots = np.asarray(knots, np.float64)
        self.card: dict[str, Any] = card or {}

    @classmethod
    def load(cls, path: str | Path | None = None) -> Ranker:
        """A saved ranker, or the one of the package. Raises :class:`RankerError` naming what is missing or corrupt."""
        folder = SHIPPED if path is None else Path(path)
        about = _read(folder)
        _verify(folder, about)
        backend = load_backend(about["backend"], folder)
        try:
            return cls(backend, np.array(about["knots"], np.float64), about["card"])
        except (RankerError, ValueError) as error:
            raise RankerError(f"{folder / RANKER_FILE}: {error}") from error

    def score(self, prompts: Sequence[str]) -> np.ndarray:
        """float32 [n], higher = longer; comparable within one ranker only. Raises ``TypeError`` for non-strings."""
        return self.backend.score(_listed(prompts))

    def quantile(self, prompts: Sequence[str]) -> np.ndarray:
        """float32 [n] in [0, 1]: the share of ordinary prompts (those of the calibration) with a lower score."""
        return quantiles(self.score(prompts), self.knots)

    def save(self, folder: str | Path) -> None:
        """Write the ranker; ``ranker.json`` comes last, so a folder without it is not a ranker. Raises
        :class:`RankerError`."""
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RANKER_FILE).unlink(missing_ok=True)
            written = self.backend.save(folder)
            about = {
                "format": FORMAT,
                "backend": self.backend.name,
                "knots": [float(k) for k in self.knots],
                "files": {f.relative_to(folder).as_posix(): _digest(f) for f in written},
                "card": self.card,
            }
            text = json.dumps(about, indent=1, ensure_ascii=False, allow_nan=False)
            (folder / RANKER_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise RankerError(f"{folder}: the ranker cannot be written: {error.strerror or error}") from error
        except ValueError as error:
            raise RankerError(f"{folder}: the model card cannot be written as JSON: {error}") from error


def quantiles(scores: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """float32 [n] in [0, 1]: the place of scores among ``knots``; the middle of the place where knots are equal."""
    share = np.linspace(0, 1, len(knots))
    low = np.interp(scores, knots, share)
    # np.interp takes the last of equal knots; from above it takes the first.
    high = 1 - np.interp(-np.asarray(scores, np.float64), -knots[::-1], share)
    return ((low + high) / 2).astype(np.float32)


def calibration(scores: np.ndarray) -> np.ndarray:
    """The knots of ordinary prompts' scores [n]. Raises :class:`RankerError` if there is none."""
    if not len(scores):
        raise RankerError("a ranker cannot be calibrated without prompts")
    return np.quantile(np.asarray(scores, np.float64), np.linspace(0, 1, KNOTS))


def _listed(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of strings, got one string")
    return list(prompts)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / RANKER_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        found = "there is no such folder" if not folder.is_dir() else f"it has no {RANKER_FILE}"
        raise RankerError(f"{folder}: not a saved ranker: {found}; make one with 'longtail rank train'") from error
    except (OSError, ValueError) as error:
        raise RankerError(f"{path}: cannot be read ({error}); train the ranker again or restore the file") from error
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise RankerError(f"{path}: not the description of a ranker; train it again or restore the file")
    if about["format"] > FORMAT:
        raise RankerError(f"{path}: format {about['format']} is newer than this version knows; upgrade longtail")
    kinds = {"backend": str, "knots": list, "files": dict, "card": dict}
    for key, kind in kinds.items():
        if not isinstance(about.get(key), kind):
            raise RankerError(f"{path}: {key!r} is missing or wrong; train the ranker again or restore the file")
    if not all(isinstance(k, (int, float)) and math.isfinite(k) for k in about["knots"]):
        raise RankerError(f"{path}: 'knots' holds something other than numbers")
    return about


def _verify(folder: Path, about: dict[str, Any]) -> None:
    for name, digest in about["files"].items():
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RankerError(f"{folder / RANKER_FILE}: {name!r} is outside the folder")
        if not path.is_file():
            raise RankerError(f"{path}: missing; train the ranker again or restore the file")
        if _digest(path) != digest:
            raise RankerError(f"{path}: corrupt (its digest is not the recorded one); restore the file or train again")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
