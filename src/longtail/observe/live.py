"""What a run looks like: a fold over its events, the one state behind the terminal, the summary and the dashboard.

Pure: no clock, no files. In events a step is named by the steps done before it (the first is 0); people count from
1, and so do this view and every display.

Invariant: after a :class:`Rollback` to ``step``, or a start of a pipeline at ``step``, nothing of later steps is left
in the pipeline's view, so ``done`` is in order of steps. What workers did and the time it took stay: they happened, and
so did what was planned. Pipelines come and go as they are told of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from longtail.core.events import (
    CheckpointSaved,
    Event,
    MoveEnded,
    MoveMade,
    Note,
    PipelineEnded,
    PipelineStarted,
    Planned,
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
from longtail.observe.moves import EVERY_STEP, ROUTINE_MOVES, SWITCHES, Move, OpenMoves
from longtail.observe.plans import PlanTotals
from longtail.observe.views import WINDOW_S, PipelineView, WorkerView


class RunView:
    """Fold events with :meth:`apply`; read the attributes."""

    def __init__(self) -> None:
        self.run = ""
        self.version = ""
        self.devices: list[str] = []
        self.pipelines: dict[str, PipelineView] = {}
        self.workers: dict[int, WorkerView] = {}
        self.notes: deque[Note] = deque(maxlen=50)
        self.moves: deque[Move] = deque(maxlen=50)
        """The last ones that are not routine."""
        self.latest_move: Move | None = None
        """What the latest event about a move told of."""
        self.plans = PlanTotals()
        self.reason: str | None = None
        """Why the run ended; None while it runs (or if it was killed)."""
        self.starts = 0
        self.now = 0.0
        """The time of the latest event."""
        self._open_moves = OpenMoves()
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

    @property
    def plan(self) -> Planned | None:
        """How pipelines share the workers now; None where there is nothing to share."""
        return self.plans.latest if self._running > 1 else None

    def groups(self, now: float | None = None) -> list[tuple[int, ...]]:
        """All workers; those of a tensor-parallel group, which are neighbours, together."""
        groups: list[tuple[int, ...]] = []
        for index in sorted(self.workers):
            group, tp = groups[-1] if groups else (), self._tp(index, now)
            together = tp > 1 and 0 < len(group) < tp and group[-1] == index - 1 and self._tp(group[0], now) == tp
            if together and self.workers[group[0]].pipeline == self.workers[index].pipeline:
                groups[-1] = (*group, index)
            else:
                groups.append((index,))
        return groups

    def _tp(self, index: int, now: float | None) -> int:
        return self.workers[index].tp if self.work(index, now) == self.workers[index].work else 1

    def apply(self, event: Event) -> list[Note]:
        """Take one event in; returns what a person should read because of it: notes, also the view's own ones."""
        if self._since is not None and not isinstance(event, RunStarted):
            self._pass(event.t - self.now)
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
                self._pipeline(event.pipeline).enter(event, self._active)
            case StepEnded():
                return self._step(event)
            case MoveMade() | MoveEnded():
                self._move(event)
            case Planned():
                self.plans.planned(event)
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
                self._worker(event.worker).lose()
                return [Note(t=event.t, level="warning", message=f"worker {event.worker} is lost: {event.reason}")]
        return []

    def _pipeline(self, name: str) -> PipelineView:
        return self.pipelines.setdefault(name, PipelineView(name))

    def _worker(self, index: int) -> WorkerView:
        return self.workers.setdefault(index, WorkerView(index))

    @property
    def _running(self) -> int:
        return sum(p.status == "running" for p in self.pipelines.values())

    def _pass(self, seconds: float) -> None:
        """Time goes by under the plan that holds."""
        if seconds > 0 and any(p.under_way for p in self.pipelines.values()):
            self.plans.passed(seconds, pipelines=self._running)

    @property
    def _segment_s(self) -> float:
        return 0.0 if self._since is None else max(0.0, self.now - self._since)

    def _end_segment(self) -> None:
        self._ended_s += self._segment_s
        for index, worker in self.workers.items():
            if index < self._active:
                worker.wall_s += self._segment_s
        for pipeline in self.pipelines.values():
            pipeline.halt(self.now)
        self.plans.forget()
        self._since = None

    def _run_started(self, event: RunStarted) -> None:
        self._end_segment()
        self.run, self.version, self.devices = event.run, event.version, list(event.devices)
        self.reason, self._since, self._active = None, event.t, event.workers
        self.now = event.t
        self.starts += 1
        for index in range(event.workers):
            self._worker(index).restart()
        for pipeline in self.pipelines.values():
            if pipeline.live:  # killed with the start before
                pipeline.status, pipeline.stage = "interrupted", None
        for name in event.pipelines:
            self._pipeline(name).restart()

    def _rollback(self, event: Rollback) -> list[Note]:
        self._open_moves.forget(event.pipeline)
        pipeline = self._pipeline(event.pipeline)
        again = pipeline.step - event.step
        pipeline.halt(event.t)
        pipeline.continue_after(event.step)
        void = f" ({again} finished steps are void)" if again > 0 else ""
        level = "warning" if pipeline.status == "running" else "info"
        message = f"continues after step {event.step}{void}: {event.reason}"
        return [Note(t=event.t, level=level, pipeline=event.pipeline, message=message)]

    def _pipeline_started(self, event: PipelineStarted) -> None:
        self._open_moves.forget(event.pipeline)
        self._pipeline(event.pipeline).start(event)

    def _pipeline_ended(self, event: PipelineEnded) -> list[Note]:
        pipeline = self._pipeline(event.pipeline)
        pipeline.halt(event.t)
        pipeline.status, pipeline.error, pipeline.stage = event.reason, event.error, None
        pipeline.step = pipeline.current = event.step
        if event.error is None:
            return []
        return [Note(t=event.t, level="error", pipeline=event.pipeline, message=event.error)]

    def _sequence(self, event: SequenceEnded) -> None:
        pipeline = self._pipeline(event.pipeline)
        if event.step >= pipeline.step:
            pipeline.samples_done += 1

    def _move(self, event: MoveMade | MoveEnded) -> None:
        if event.move == EVERY_STEP:
            return
        pipeline = self._pipeline(event.pipeline)
        move = self._open_moves.made(event) if isinstance(event, MoveMade) else self._open_moves.ended(event)
        if isinstance(event, MoveEnded) or event.move not in SWITCHES:
            pipeline.moved(move)
        if isinstance(event, MoveMade) and event.move in SWITCHES:
            pipeline.relocated()
        if event.move not in ROUTINE_MOVES:
            if isinstance(event, MoveMade) or move.made is None:
                self.moves.append(move)
            self.latest_move = move

    def _span(self, event: Span) -> None:
        self._worker(event.worker).ran(event)
        for pipeline in self.pipelines.values():
            pipeline.time.used(event, own=pipeline.name == event.pipeline)
        if event.substage == "decode":
            self._pipeline(event.pipeline).decoded(event)

    def _progress(self, event: Progress) -> None:
        together = self._worker(event.worker).progress(event)
        self._pipeline(event.pipeline).live_on(event.worker, (event.waiting + event.running) / together)

    def _step(self, event: StepEnded) -> list[Note]:
        fresh = list(map(str, self._pipeline(event.pipeline).finish_step(event)))
        if not fresh:
            return []
        return [Note(t=event.t, level="warning", pipeline=event.pipeline, message="; ".join(fresh))]
