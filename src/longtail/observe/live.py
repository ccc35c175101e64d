"""What a run looks like: a fold over its events, the one state behind the terminal, the summary and the dashboard.

Pure: no clock, no files. In events a step is named by the steps done before it (the first is 0); people count from
1, and so do this view and every display. ``done`` maps the number of a finished step to its record.

Invariant: after a :class:`Rollback` to ``step``, or a start of a pipeline at ``step``, nothing of later steps is left
in the pipeline's view, so ``done`` is in order of steps. What workers did and the time it took stay: they happened.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from longtail.core.events import (
    CheckpointSaved,
    Event,
    MoveMade,
    Note,
    PipelineEnded,
    PipelineStarted,
    Progress,
    Rollback,
    RunEnded,
    RunStarted,
    SequenceEnded,
    Span,
    StageEntered,
    StepEnded,
    WorkerLost,
)

WINDOW_S = 10.0
"""Utilisation and tokens/s are means over this many seconds."""
STEP_STAGES = ("rollout", "score", "train", "update")
ROUTINE_MOVES = {"order"}
"""Moves that every step of a pipeline has: they are in the log, and not worth a line of a display."""
QUIET_S = 3.0
"""A worker that has reported nothing for longer than this is idle, not merely between two reports."""


class StepRecord(NamedTuple):
    """What is kept of a finished step: NaN where its metrics lacked the value."""

    reward: float
    time_s: float
    tokens: float


@dataclass
class Spell:
    """Consecutive steps ``first`` to ``last`` in which ``metric`` was the non-finite ``word`` (NaN, inf, -inf)."""

    metric: str
    word: str
    first: int
    last: int

    def __str__(self) -> str:
        where = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        return f"{self.metric} is {self.word} at {where}"


@dataclass
class PipelineView:
    """``status`` is ``waiting``, ``running``, ``finished``, ``failed`` or ``interrupted``."""

    name: str
    status: str = "waiting"
    error: str | None = None
    model: str = ""
    task: str = ""
    parameters: int = 0
    step: int = 0
    """Steps done."""
    current: int = 0
    """The step being worked on; equal to ``step`` between steps."""
    steps: int | None = None
    """The goal."""
    stage: str | None = None
    samples_done: int = 0
    """Of the current step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last finished step."""
    done: dict[int, StepRecord] = field(default_factory=dict)
    spells: list[Spell] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    _per_step: int | None = None
    _live: dict[int, int] = field(default_factory=dict)
    _decoded: deque[tuple[float, float, int]] = field(default_factory=deque)
    _decoded_since: float = math.inf
    _decoded_until: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each finished step that is not void, in order of steps; NaN where it had none."""
        return [record.reward for record in self.done.values()]

    @property
    def checkpoint(self) -> str | None:
        return self.checkpoints[-1][1] if self.checkpoints else None

    @property
    def samples_expected(self) -> int | None:
        """Samples of the current step: as many as the last step had, or done and live ones; None if not known yet."""
        if self._per_step is not None:
            return max(self._per_step, self.samples_done)
        live = sum(self._live.values())
        return self.samples_done + live if live else None

    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second in the window before the last report; the last step's where none is recent."""
        if self._decoded:
            until = self._decoded_until
            since = max(until - WINDOW_S, self._decoded_since)
            tokens = sum(n * _overlap(a, b, since, until) for a, b, n in self._decoded)
            return tokens / (until - since) if until > since else None
        return self.metrics.get("tokens_per_s")

    def continue_after(self, step: int) -> None:
        """Forget what later steps left, and the half-done current one."""
        self.step = self.current = step
        self.stage = None
        self.samples_done = 0
        self._live.clear()
        for late in [s for s in self.done if s > step]:
            del self.done[late]
        self.checkpoints = [c for c in self.checkpoints if c[0] <= step]
        self.spells = [s for s in self.spells if s.first <= step]
        for spell in self.spells:
            spell.last = min(spell.last, step)


@dataclass
class WorkerView:
    index: int
    busy_s: float = 0.0
    """Over all starts of the run."""
    wall_s: float = 0.0
    """How long the run had this worker, over all starts that have ended; see :meth:`RunView.worker_wall_s`."""
    lost: int = 0
    work: str = ""
    """What it did last, such as ``sums decode b=2``."""
    reported: float = -math.inf
    _spans: deque[tuple[float, float, float]] = field(default_factory=deque)

    def utilisation(self, now: float, since: float) -> float | None:
        """Busy share of the window before ``now``, a worker's latest report standing for now where it is recent."""
        until = self._spans[-1][1] if self._spans else now
        if now - until > QUIET_S:
            until = now
        begin = max(until - WINDOW_S, since)
        if until <= begin:
            return None
        return min(1.0, sum(s * _overlap(a, b, begin, until) for a, b, s in self._spans) / (until - begin))


class RunView:
    """Fold events with :meth:`apply`; read the attributes."""

    def __init__(self) -> None:
        self.run = ""
        self.version = ""
        self.devices: list[str] = []
        self.pipelines: dict[str, PipelineView] = {}
        self.workers: dict[int, WorkerView] = {}
        self.notes: deque[Note] = deque(maxlen=50)
        self.moves: deque[MoveMade] = deque(maxlen=50)
        """The last ones that are not routine."""
        self.reason: str | None = None
        """Why the run ended; None while it runs (or if it was killed)."""
        self.starts = 0
        self.now = 0.0
        """The time of the latest event."""
        self._since: float | None = None
        self._ended_s = 0.0
        self._active = 0

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunView:
        view = cls()
        for event in events:
            view.apply(event)
        return view

    @property
    def running_s(self) -> float:
        """Wall time while the run ran, without the gaps between an end (or a kill) and the next start."""
        return self._ended_s + self._segment_s

    def worker_wall_s(self, index: int) -> float:
        """Seconds of ``running_s`` in which the run had the worker."""
        open_s = self._segment_s if index < self._active else 0.0
        return self.workers[index].wall_s + open_s

    def utilisation(self, index: int, now: float | None = None) -> float | None:
        """Busy share of a worker, 0 to 1: over the last ``WINDOW_S`` seconds, or over the whole run once it has ended.

        None where no time has passed.
        """
        if self._since is None:
            wall_s = self.worker_wall_s(index)
            return min(1.0, self.workers[index].busy_s / wall_s) if wall_s else None
        return self.workers[index].utilisation(self.now if now is None else now, self._since)

    def work(self, index: int, now: float | None = None) -> str:
        """What the worker does, or ``idle``; nothing once the run has ended."""
        if self._since is None:
            return ""
        worker = self.workers[index]
        late = (self.now if now is None else now) - worker.reported
        return worker.work if late <= WINDOW_S else "idle"

    def apply(self, event: Event) -> list[Note]:
        """Take one event in; returns what a person should read because of it: notes, also the view's own ones."""
        notes = self._dispatch(event)
        self.now = max(self.now, event.t)
        self.notes.extend(notes)
        return notes

    def _dispatch(self, event: Event) -> list[Note]:
        match event:
            case Span():
                self._span(event)
            case Progress():
                self._progress(event)
            case SequenceEnded():
                self._sequence(event)
            case StageEntered():
                self._stage(event)
            case StepEnded():
                return self._step(event)
            case MoveMade():
                if event.move not in ROUTINE_MOVES:
                    self.moves.append(event)
            case CheckpointSaved():
                self._pipeline(event.pipeline).checkpoints.append((event.step, event.path))
            case Note():
                return [event]
            case RunStarted():
                self._run_started(event)
            case RunEnded():
                self.reason = event.reason
                self.now = max(self.now, event.t)
                self._end_segment()
            case PipelineStarted():
                self._pipeline_started(event)
            case PipelineEnded():
                return self._pipeline_ended(event)
            case Rollback():
                return self._rollback(event)
            case WorkerLost():
                worker = self._worker(event.worker)
                worker.lost += 1
                worker.work = "lost"
                return [Note(t=event.t, level="warning", message=f"worker {event.worker} is lost: {event.reason}")]
        return []

    def _pipeline(self, name: str) -> PipelineView:
        return self.pipelines.setdefault(name, PipelineView(name))

    def _worker(self, index: int) -> WorkerView:
        return self.workers.setdefault(index, WorkerView(index))

    @property
    def _segment_s(self) -> float:
        return 0.0 if self._since is None else max(0.0, self.now - self._since)

    def _end_segment(self) -> None:
        self._ended_s += self._segment_s
        for index, worker in self.workers.items():
            if index < self._active:
                worker.wall_s += self._segment_s
        self._since = None

    def _run_started(self, event: RunStarted) -> None:
        self._end_segment()
        self.run, self.version, self.devices = event.run, event.version, list(event.devices)
        self.reason, self._since, self._active = None, event.t, event.workers
        self.now = event.t
        self.starts += 1
        for index in range(event.workers):
            worker = self._worker(index)
            worker.work, worker.reported = "", -math.inf
            worker._spans.clear()
        for name in event.pipelines:
            pipeline = self._pipeline(name)
            pipeline._decoded.clear()
            pipeline._decoded_since, pipeline._decoded_until = math.inf, 0.0
            if pipeline.status != "finished":
                pipeline.status, pipeline.error, pipeline.stage = "waiting", None, None

    def _rollback(self, event: Rollback) -> list[Note]:
        pipeline = self._pipeline(event.pipeline)
        again = pipeline.step - event.step
        pipeline.continue_after(event.step)
        void = f" ({again} finished steps are void)" if again > 0 else ""
        level = "warning" if pipeline.status == "running" else "info"
        message = f"continues after step {event.step}{void}: {event.reason}"
        return [Note(t=event.t, level=level, pipeline=event.pipeline, message=message)]

    def _pipeline_started(self, event: PipelineStarted) -> None:
        pipeline = self._pipeline(event.pipeline)
        pipeline.continue_after(event.step)
        pipeline.status, pipeline.error = "running", None
        pipeline.steps, pipeline.model, pipeline.task = event.steps, event.model, event.task
        pipeline.parameters = event.parameters

    def _pipeline_ended(self, event: PipelineEnded) -> list[Note]:
        pipeline = self._pipeline(event.pipeline)
        pipeline.status, pipeline.error, pipeline.stage = event.reason, event.error, None
        pipeline.step = pipeline.current = event.step
        if event.error is None:
            return []
        return [Note(t=event.t, level="error", pipeline=event.pipeline, message=event.error)]

    def _stage(self, event: StageEntered) -> None:
        pipeline = self._pipeline(event.pipeline)
        pipeline.stage = event.stage
        pipeline.current = event.step + (event.stage in STEP_STAGES)
        if event.stage == "rollout":
            pipeline.samples_done = 0
            pipeline._live.clear()

    def _sequence(self, event: SequenceEnded) -> None:
        pipeline = self._pipeline(event.pipeline)
        if event.step >= pipeline.step:
            pipeline.samples_done += 1

    def _span(self, event: Span) -> None:
        worker = self._worker(event.worker)
        worker.busy_s += event.busy_s
        worker.reported = max(worker.reported, event.end)
        batch = f" b={event.batch:.0f}" if event.substage == "decode" else ""
        worker.work = f"{event.pipeline} {event.substage}{batch}"
        worker._spans.append((event.start, event.end, event.busy_s))
        _prune(worker._spans, event.end)
        if event.substage == "decode":
            pipeline = self._pipeline(event.pipeline)
            pipeline._decoded.append((event.start, event.end, event.tokens))
            pipeline._decoded_since = min(pipeline._decoded_since, event.start)
            pipeline._decoded_until = max(pipeline._decoded_until, event.end)
            _prune(pipeline._decoded, pipeline._decoded_until)

    def _progress(self, event: Progress) -> None:
        worker = self._worker(event.worker)
        worker.reported = max(worker.reported, event.t)
        batch = f" b={event.running}" if event.substage == "decode" else ""
        worker.work = f"{event.pipeline} {event.substage}{batch}"
        self._pipeline(event.pipeline)._live[event.worker] = event.waiting + event.running

    def _step(self, event: StepEnded) -> list[Note]:
        pipeline, metrics = self._pipeline(event.pipeline), event.metrics
        pipeline.metrics = metrics
        number = event.step + 1
        pipeline.step = pipeline.current = number
        pipeline.stage = None
        reward, time_s, tokens = (metrics.get(k, math.nan) for k in ("reward_mean", "time_s", "tokens"))
        pipeline.done[number] = StepRecord(reward, time_s, tokens)
        sequences = metrics.get("sequences")
        if sequences is not None and math.isfinite(sequences):
            pipeline._per_step = round(sequences)
        fresh = list(map(str, _new_spells(pipeline.spells, number, metrics)))
        if not fresh:
            return []
        return [Note(t=event.t, level="warning", pipeline=event.pipeline, message="; ".join(fresh))]


def _new_spells(spells: list[Spell], step: int, metrics: dict[str, float]) -> list[Spell]:
    """Extend the spells that go on in this step (counted from 1), and append and return those that begin."""
    fresh = []
    for metric, value in metrics.items():
        if math.isfinite(value):
            continue
        word = "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        for spell in spells:
            if spell.metric == metric and spell.word == word and spell.last == step - 1:
                spell.last = step
                break
        else:
            fresh.append(Spell(metric, word, step, step))
    spells.extend(fresh)
    return fresh


def _overlap(start: float, end: float, since: float, until: float) -> float:
    """The fraction of [start, end] that lies in [since, until]; a point counts fully when it lies inside."""
    if end <= start:
        return 1.0 if since <= start <= until else 0.0
    return max(0.0, min(end, until) - max(start, since)) / (end - start)


def _prune(spans: deque, until: float) -> None:
    while spans and spans[0][1] < until - WINDOW_S:
        spans.popleft()
