"""What happened in a run: one versioned schema, written as JSON lines and read by every view of a run.

Times (``t``, ``start``, ``end``) are Unix seconds; durations end in ``_s``. Events are append-only. A pipeline
that falls back to a checkpoint writes a :class:`Rollback`; the events of later steps that stand before it are void.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base: ``t`` is when the event was made."""

    kind: ClassVar[str]
    t: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """First event of each start of a run (a resumed run has several)."""

    kind: ClassVar[str] = "run_started"
    run: str
    version: str
    schema: int = SCHEMA_VERSION
    workers: int
    devices: list[str]
    pipelines: list[str]
    resumed: bool = False


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    """``reason``: ``finished``, ``interrupted`` or ``failed``."""

    kind: ClassVar[str] = "run_ended"
    reason: str


@dataclass(frozen=True, kw_only=True)
class PipelineStarted(Event):
    """``step`` steps were already done (0, or what the checkpoint holds); ``steps`` is the goal."""

    kind: ClassVar[str] = "pipeline_started"
    pipeline: str
    step: int
    steps: int
    model: str
    task: str
    parameters: int


@dataclass(frozen=True, kw_only=True)
class PipelineEnded(Event):
    """``reason``: ``finished``, ``failed`` or ``interrupted``; ``error`` is the sentence shown to the user."""

    kind: ClassVar[str] = "pipeline_ended"
    pipeline: str
    step: int
    reason: str
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageEntered(Event):
    """A pipeline's current step moved on to ``rollout``, ``score``, ``train``, ``update`` or ``checkpoint``; before the
    first one come ``load`` and, where costs are to be measured, ``profile``."""

    kind: ClassVar[str] = "stage"
    pipeline: str
    step: int
    stage: str


@dataclass(frozen=True, kw_only=True)
class Span(Event):
    """A run of quanta of one (pipeline, sub-stage) on one worker between ``start`` and ``end``.

    Quanta of other pipelines may lie between them; ``busy_s`` counts only this span's own quanta, so the sum of
    ``busy_s`` over a worker's spans divided by wall time is its utilisation. ``batch`` is the mean number of
    sequences in a quantum, ``context`` of tokens in their lanes together. In a tensor-parallel group of ``tp`` workers
    each tells its own span of the same work.
    """

    kind: ClassVar[str] = "span"
    worker: int
    pipeline: str
    substage: str
    step: int
    start: float
    end: float
    busy_s: float
    quanta: int
    tokens: int
    batch: float
    context: float = 0.0
    tp: int = 1


@dataclass(frozen=True, kw_only=True)
class SequenceEnded(Event):
    """One sample: its lengths in tokens, where and when it ran, how it ended."""

    kind: ClassVar[str] = "sequence"
    pipeline: str
    step: int
    prompt: int
    sample: int
    worker: int
    prompt_tokens: int
    tokens: int
    finish: str
    preemptions: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """One training step of a pipeline: ``metrics`` holds reward, loss, lengths, times (see docs/metrics)."""

    kind: ClassVar[str] = "step"
    pipeline: str
    step: int
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class MoveMade(Event):
    """A decision of the planner, with what it was predicted to bring and to cost: ``order``; ``widen``, ``narrow``;
    ``place`` (a rollout begins on fewer than all workers), ``merge`` (its samples move to fewer), ``spread`` (to more);
    ``hold`` where a whole rollout passed without any of these.

    ``predicted_gain_s`` is before, ``predicted_cost_s`` is what the move itself takes of it. ``layout`` is the one that
    a widening or narrowing leads to.
    """

    kind: ClassVar[str] = "move"
    pipeline: str
    step: int
    move: str
    workers: list[int]
    reason: str
    predicted_gain_s: float | None = None
    predicted_cost_s: float | None = None
    layout: str | None = None


@dataclass(frozen=True, kw_only=True)
class MoveEnded(Event):
    """What a widening or narrowing of ``workers`` came to.

    ``cost_s`` is what the switch itself took, ``moved_bytes`` of KV went from worker to worker, ``recomputed_tokens``
    were computed again; or it was ``refused`` (why, in words) and everything is as before. ``rest_s`` is how long the
    samples concerned took from the decision on, ``predicted_rest_s`` what was predicted, and ``gain_s`` how much longer
    they would have taken without the move, by the cost table and the lengths that they came to have.
    """

    kind: ClassVar[str] = "move_ended"
    pipeline: str
    step: int
    move: str
    workers: list[int]
    cost_s: float
    moved_bytes: int
    recomputed_tokens: int
    predicted_cost_s: float | None = None
    predicted_rest_s: float | None = None
    rest_s: float | None = None
    gain_s: float | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Planned(Event):
    """How pipelines share the workers from now on, as the planner sees it: ``mode`` is ``share`` (side by side) or
    ``hold`` (in turns, since sharing would lose).

    ``rates`` are predicted: the progress of each pipeline as a share of what it would make with all workers to itself
    (their sum is the throughput over that of taking turns). ``weights``: by which workers share their time.
    ``duration_s`` is what planning took.
    """

    kind: ClassVar[str] = "planned"
    mode: str
    reason: str
    rates: dict[str, float]
    weights: dict[str, float]
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind: ClassVar[str] = "checkpoint"
    pipeline: str
    step: int
    path: str
    bytes: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class Rollback(Event):
    """The pipeline continues after ``step`` done steps; what was logged of later steps is void."""

    kind: ClassVar[str] = "rollback"
    pipeline: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    kind: ClassVar[str] = "worker_lost"
    worker: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Note(Event):
    """Something a person should read; ``level`` is ``info``, ``warning`` or ``error``."""

    kind: ClassVar[str] = "note"
    level: str
    message: str
    pipeline: str | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Event):
    """A live reading for displays; never stored. ``waiting`` and ``running`` count the pipeline's sequences there."""

    kind: ClassVar[str] = "progress"
    worker: int
    pipeline: str
    substage: str
    waiting: int
    running: int
    lanes_used: int
    lanes_total: int


EVENTS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RunStarted, RunEnded, PipelineStarted, PipelineEnded, StageEntered, Span, SequenceEnded, StepEnded,
        MoveMade, MoveEnded, Planned, CheckpointSaved, Rollback, WorkerLost, Note, Progress,
    )
}  # fmt: skip


def to_record(event: Event) -> dict[str, Any]:
    """The event as a dict for strict JSON: non-finite numbers become null and are named under ``nonfinite``."""
    record: dict[str, Any] = {"kind": event.kind, **dataclasses.asdict(event)}
    marks: dict[str, str] = {}
    _strip_nonfinite(record, "", marks)
    if marks:
        record["nonfinite"] = marks
    return record


def from_record(record: dict[str, Any]) -> Event:
    """The inverse of :func:`to_record`; unknown fields of a newer schema are ignored.

    Raises ``KeyError`` on an unknown kind.
    """
    cls = EVENTS[record["kind"]]
    names = {f.name for f in dataclasses.fields(cls)}
    values = {k: v for k, v in record.items() if k in names}
    for path, word in record.get("nonfinite", {}).items():
        target, slash, key = path.partition("/")
        values[target] = {**values[target], key: float(word)} if slash else float(word)
    return cls(**values)


def _strip_nonfinite(node: dict[str, Any], prefix: str, marks: dict[str, str]) -> None:
    for key, value in node.items():
        if isinstance(value, numbers.Real) and not isinstance(value, int):  # also numpy's numbers
            node[key] = int(value) if isinstance(value, numbers.Integral) else float(value)
            if not math.isfinite(value):
                marks[prefix + key] = repr(float(value))
                node[key] = None
        elif isinstance(value, dict):
            node[key] = dict(value)
            _strip_nonfinite(node[key], f"{prefix}{key}/", marks)


class Sink(Protocol):
    """Where events go: the run store, metrics, the terminal. Calls come from one thread, in order."""

    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...
