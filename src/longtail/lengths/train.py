"""Training a ranker: one call, whatever the backend and the objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from longtail.core.errors import RankerError
from longtail.lengths.backend import Backend, BackendName
from longtail.lengths.data import LengthData, split
from longtail.lengths.data_values import texts
from longtail.lengths.evaluate import evaluate
from longtail.lengths.feature_rows import score_inputs
from longtail.lengths.objectives import ObjectiveName
from longtail.lengths.ranker import Ranker, calibration
from longtail.lengths.seen import fingerprint

if TYPE_CHECKING:
    from longtail.lengths.train_light import Teacher

FEW = 200
"""With fewer held-out prompts than this, scores are calibrated on all prompts instead."""
SCORED_AT_ONCE = 256
"""Unlabelled prompts between two words of progress."""


@dataclass(frozen=True)
class TrainConfig:
    """How a ranker is trained. ``delta``, ``margin`` and ``partners`` belong to the margin objective (PARS, arXiv
    2510.03243): pairs differ by ``delta`` of the longer length, each prompt draws ``partners``. ``epochs`` None is the
    backend's default (for the light backend: optimizer steps over the whole data). ``encoder`` and ``max_length``
    (tokens) name the transformer of the encoder backend, ``teacher`` the one that teaches the light backend; both take
    a folder, ``minilm`` or a Hugging Face id. ``valid`` is the share of prompts held out for the card's figures.
    """

    backend: BackendName = "light"
    objective: ObjectiveName = "margin"
    delta: float = 0.2
    margin: float = 1.0
    partners: int = 10
    epochs: int | None = None
    seed: int = 0
    encoder: str | None = None
    max_length: int = 128
    teacher: str | None = None
    valid: float = 0.1


class Progress(NamedTuple):
    """How far training is: ``done`` of ``total`` steps of a ``phase`` (teacher, scoring, training)."""

    phase: str
    done: int
    total: int
    loss: float | None


def train(
    data: LengthData,
    config: TrainConfig,
    *,
    held_out: LengthData | None = None,
    unlabelled: Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Ranker:
    """Train on ``data``. Scores are calibrated, and the figures of the card made, on ``held_out``; None takes the share
    ``config.valid`` of the prompts out of ``data`` for that.

    With ``config.teacher``, an encoder is fine-tuned first, scores ``unlabelled`` prompts too, and the light backend
    learns from both its scores and the lengths. Deterministic for a seed on one machine.

    Raises :class:`RankerError` if the data holds no order to learn, or an encoder cannot be had, and
    :class:`DataError` if one is asked for and the data holds features of prompts.
    """
    if config.teacher and config.backend != "light":
        raise RankerError("a teacher is for the light backend; the encoder backend is trained directly")
    if len(data) < 2:
        raise RankerError(f"{len(data)} prompts are too few to learn an order from: give at least two")
    if config.backend == "encoder" or config.teacher:
        texts([*data.inputs, *(held_out.inputs if held_out else ())])
    learn = data
    if held_out is None:
        learn, held_out = split(data, test=config.valid, seed=config.seed) if config.valid else (data, data.take(_NONE))
        if not _has_order(learn):
            learn, held_out = data, data.take(_NONE)
    backend = _fit(learn, config, unlabelled, progress)
    scores = score_inputs(backend, held_out.inputs if len(held_out) >= FEW else data.inputs)
    ranker = Ranker(backend, calibration(scores))
    ranker.card = {
        "training": _plain(asdict(config)) | {"prompts": len(learn), "unlabelled": len(unlabelled)},
        "data": [
            {"source": name, "unit": unit, "prompts": int((data.sources == i).sum())}
            for i, (name, unit) in enumerate(zip(data.source_names, data.units, strict=True))
        ],
        "calibrated_on": "held-out prompts" if len(held_out) >= FEW else "all prompts",
        "validation": _figures(backend, held_out, config),
        "seen": fingerprint(learn.inputs),
    }
    return ranker


_NONE = np.empty(0, np.int64)


def _fit(
    data: LengthData,
    config: TrainConfig,
    unlabelled: Sequence[str],
    progress: Callable[[Progress], None] | None,
) -> Backend:
    if config.backend == "encoder":
        from longtail.lengths.train_encoder import train_encoder

        return train_encoder(data, config, progress=_phase(progress, "training"))
    from longtail.lengths.train_light import train_light

    teacher = _teach(data, config, unlabelled, progress) if config.teacher else None
    return train_light(data, config, teacher=teacher, progress=_phase(progress, "training"))


def _teach(
    data: LengthData,
    config: TrainConfig,
    unlabelled: Sequence[str],
    progress: Callable[[Progress], None] | None,
) -> Teacher:
    """Fine-tune ``config.teacher`` on the labels and let it score everything."""
    from longtail.lengths.train_encoder import train_encoder
    from longtail.lengths.train_light import Teacher

    fine_tuning = replace(config, backend="encoder", encoder=config.teacher, epochs=None)
    encoder = train_encoder(data, fine_tuning, progress=_phase(progress, "teacher"))
    known = set(data.prompts)
    extra = [p for p in dict.fromkeys(unlabelled) if p not in known]
    told = _phase(progress, "scoring")
    scores = [np.empty(0, np.float32)]
    for start in range(0, len(extra), SCORED_AT_ONCE):
        scores.append(encoder.score(extra[start : start + SCORED_AT_ONCE]))
        if told is not None:
            told(min(start + SCORED_AT_ONCE, len(extra)), len(extra), None)
    return Teacher(encoder.score(data.prompts), extra, np.concatenate(scores))


def _phase(progress: Callable[[Progress], None] | None, phase: str) -> Callable[[int, int, float | None], None] | None:
    """``progress`` as the trainers call it."""
    return None if progress is None else lambda done, total, loss: progress(Progress(phase, done, total, loss))


def _has_order(data: LengthData) -> bool:
    """Whether some source has two different lengths; what a tiny data set may lose by holding prompts out."""
    return any(len(np.unique(data.lengths[data.sources == s])) > 1 for s in np.unique(data.sources))


def _figures(backend: Backend, data: LengthData, config: TrainConfig) -> dict[str, Any] | None:
    """Kendall's tau of each source on held-out prompts."""
    figures = {}
    for s in np.unique(data.sources):
        part = data.take(data.sources == s)
        result = evaluate(
            score_inputs(backend, part.inputs),
            part.lengths,
            delta=config.delta,
            seed=config.seed,
            censored=part.censored,
        )
        figures[data.source_names[s]] = _plain(
            {"prompts": len(part), "tau": result.tau, "undefined": result.reasons.get("tau")}
        )
    return figures or None


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
