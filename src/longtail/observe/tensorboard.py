"""TensorBoard files, written without torch: one TensorBoard run per pipeline, and one for the workers.

``folder/PIPELINE`` holds every metric of :class:`StepEnded` under its own name, and the histogram ``length`` of the
step's response lengths, against the number of steps done; and of the kinds of moves that a step had, ``widen/count``,
``widen/net_gain_s``, ``widen/cost_s`` and what was predicted of both, as far as known. ``folder/_workers`` holds
``w0/utilisation`` and so on, and what the planner said of sharing, against seconds since the first start. Pipelines are
separate runs because a restart marker makes void all later steps of its whole run: that is how TensorBoard forgets the
steps after a rollback.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from longtail.core.events import (
    Event,
    MoveEnded,
    MoveMade,
    PipelineEnded,
    PipelineStarted,
    Planned,
    Rollback,
    RunStarted,
    SequenceEnded,
    Span,
    StepEnded,
)
from longtail.observe.appendfile import AppendFile
from longtail.observe.moves import ROUTINE_MOVES, SWITCHES, Move, MoveTotals, OpenMoves, add
from longtail.observe.plans import IN_TURNS, throughput
from longtail.observe.store import warn_on_stderr

WORKERS_RUN = "_workers"  # no pipeline can have this name
WORKERS_EVERY_S = 10.0
HISTOGRAM_BINS = 40

_file_numbers = itertools.count()


class TensorBoardSink:
    """Writes below ``folder``. Where the disk is full points are left out, with one warning then and one at the end."""

    def __init__(self, folder: Path, *, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._folder = Path(folder)
        self._warn = warn
        self._files: dict[str, _EventFile] = {}
        self._lengths: dict[str, list[int]] = {}
        self._open_moves = OpenMoves()
        self._moves: dict[str, dict[str, MoveTotals]] = {}
        self._busy_s: dict[int, float] = {}
        self._plans: list[Planned] = []
        self._origin: int | None = None
        self._workers_since: float | None = None
        self._lost = 0

    def write(self, event: Event) -> None:
        """Add the event's points; never raises because of the disk."""
        match event:
            case StepEnded():
                self._step(event)
            case SequenceEnded():
                self._lengths.setdefault(event.pipeline, []).append(event.tokens)
            case MoveMade():
                move = self._open_moves.made(event)
                if event.move not in SWITCHES | ROUTINE_MOVES:
                    self._moved(move)
            case MoveEnded():
                self._moved(self._open_moves.ended(event))
            case Planned():
                self._plans.append(event)
            case PipelineEnded():  # others may come for a long time
                if (file := self._files.pop(event.pipeline, None)) is not None:
                    file.close()
            case PipelineStarted() | Rollback():
                self._lengths.pop(event.pipeline, None)
                self._moves.pop(event.pipeline, None)
                self._open_moves.forget(event.pipeline)
                restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._add(event.pipeline, event_pb2.Event(wall_time=event.t, step=event.step + 1, session_log=restart))
            case RunStarted():
                self._busy_s = dict.fromkeys(range(event.workers), 0.0)
                self._plans = []
                self._workers_since = event.t
            case Span():
                self._busy_s[event.worker] = self._busy_s.get(event.worker, 0.0) + event.busy_s
                self._workers(event.end)

    def close(self) -> None:
        """Close the files; safe to call twice."""
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._lost:
            self._warn(f"{self._folder} is incomplete: {self._lost} points could not be written.")
            self._lost = 0

    def _moved(self, move: Move) -> None:
        add(self._moves.setdefault(move.told.pipeline, {}), move.told.move, MoveTotals.of(move))

    def _step(self, event: StepEnded) -> None:
        metrics = event.metrics | _move_metrics(self._moves.pop(event.pipeline, {}))
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        if lengths := self._lengths.pop(event.pipeline, None):
            values.append(summary_pb2.Summary.Value(tag="length", histo=_histogram(np.array(lengths))))
        summary = summary_pb2.Summary(value=values)
        self._add(event.pipeline, event_pb2.Event(wall_time=event.t, step=event.step + 1, summary=summary))

    def _workers(self, now: float) -> None:
        """A point per worker for each period of ``WORKERS_EVERY_S``: the busy share of that period; and what was
        planned in it."""
        if self._workers_since is None or now - self._workers_since < WORKERS_EVERY_S:
            return
        wall_s = now - self._workers_since
        curves = {
            f"w{worker}/utilisation": min(1.0, busy_s / wall_s) for worker, busy_s in sorted(self._busy_s.items())
        }
        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value)
            for tag, value in (curves | _plan_metrics(self._plans)).items()
        ]
        if self._origin is None:
            self._origin = _first_start(self._folder / WORKERS_RUN, now)
        summary = summary_pb2.Summary(value=values)
        self._add(WORKERS_RUN, event_pb2.Event(wall_time=now, step=max(0, round(now) - self._origin), summary=summary))
        self._busy_s = dict.fromkeys(self._busy_s, 0.0)
        self._plans = []
        self._workers_since = now

    def _add(self, run: str, point: event_pb2.Event) -> None:
        try:
            if run not in self._files:
                self._files[run] = _EventFile(self._folder / run)
            self._files[run].add(point)
        except OSError as error:
            if not self._lost:
                self._warn(
                    f"{self._folder} cannot be written ({error.strerror}). The run goes on without these curves."
                )
            self._lost += 1


class _EventFile:
    """One ``events.out.tfevents.*`` file; records are whole, so that a full disk does not hide what follows."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names: that of two of one second is the order of their numbers.
        number = f"{next(_file_numbers):06d}"
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._file = AppendFile(folder / name)
        self._record = bytearray()
        self._writer = RecordWriter(self)
        self.add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, point: event_pb2.Event) -> None:
        self._record.clear()
        self._writer.write(point.SerializeToString())
        self._file.append(bytes(self._record))

    def write(self, piece: bytes) -> None:
        """Called by the record writer with each piece of a framed record."""
        self._record += piece

    def close(self) -> None:
        self._file.close()


def _move_metrics(moves: dict[str, MoveTotals]) -> dict[str, float]:
    """What is known of the moves of a step, summed by kind."""
    metrics: dict[str, float] = {}
    for kind, total in moves.items():
        metrics[f"{kind}/count"] = total.count
        if kind in SWITCHES:
            metrics[f"{kind}/cost_s"] = total.cost_s
        if total.priced:
            metrics[f"{kind}/predicted_cost_s"] = total.predicted_cost_s
        if total.judged:
            metrics |= {f"{kind}/net_gain_s": total.net_s, f"{kind}/predicted_net_gain_s": total.predicted_net_s}
        elif total.foretold:
            metrics[f"{kind}/predicted_net_gain_s"] = total.foretold_net_s
    return metrics


def _plan_metrics(plans: list[Planned]) -> dict[str, float]:
    """Means over the plans that were told in a period."""
    if not plans:
        return {}
    metrics = {"planner/ms": 1000 * sum(p.duration_s for p in plans) / len(plans)}
    metrics["planner/in_turns"] = sum(p.mode == IN_TURNS for p in plans) / len(plans)
    rates = [rate for p in plans if (rate := throughput(p)) is not None]
    return metrics | ({"planner/predicted_rate": sum(rates) / len(rates)} if rates else {})


def _histogram(values_N: np.ndarray) -> summary_pb2.HistogramProto:
    counts, edges = np.histogram(values_N, bins=min(HISTOGRAM_BINS, max(1, int(np.ptp(values_N)))))
    return summary_pb2.HistogramProto(
        min=float(values_N.min()),
        max=float(values_N.max()),
        num=len(values_N),
        sum=float(values_N.sum()),
        sum_squares=float(np.square(values_N.astype(np.float64)).sum()),
        # The first limit closes an empty bucket to the left of the smallest value.
        bucket_limit=edges.tolist(),
        bucket=[0.0, *counts.tolist()],
    )


def _first_start(folder: Path, now: float) -> int:
    """Unix seconds of the oldest event file in ``folder``, so that a resumed run continues its time axis."""
    stamps = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.glob("events.out.tfevents.*")]
    return min([int(stamp.group(1)) for stamp in stamps if stamp], default=round(now))
