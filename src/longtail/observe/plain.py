"""Progress as plain lines, for logs and pipes: no escape codes, and never more than a reader can follow."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from longtail.core.events import (
    CheckpointSaved,
    Event,
    MoveMade,
    Note,
    PipelineEnded,
    PipelineStarted,
    RunEnded,
    RunStarted,
    StepEnded,
)
from longtail.observe.live import ROUTINE_MOVES, RunView
from longtail.observe.text import duration, lines, number, one_line, reward, short_path


class PlainSink:
    """One line per finished step and pipeline, at most one each ``every_s`` seconds of the run's own time, but always
    a pipeline's first and last step; moves and checkpoints likewise. Notes, starts and ends are never left out.

    ``view`` is the run so far (of a resumed run). A closed pipe switches the sink off.
    """

    def __init__(self, stream: TextIO | None = None, *, view: RunView | None = None, every_s: float = 1.0) -> None:
        self._stream: TextIO | None = sys.stdout if stream is None else stream
        self._encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self.view = RunView() if view is None else view
        self._every_s = every_s
        self._last: dict[tuple[str, str], float] = {}
        self._held: dict[str, StepEnded] = {}

    def write(self, event: Event) -> None:
        """Print what the event is worth; never raises because of the stream."""
        notes = self.view.apply(event)
        match event:
            case RunStarted():
                devices = ", ".join(dict.fromkeys(event.devices))
                again = "   (resumed)" if event.resumed else ""
                self._print(
                    event.t, f"longtail {event.version}   {event.workers} workers ({devices})   {event.run}{again}"
                )
            case PipelineStarted():
                where = f" from step {event.step}" if event.step else ""
                size = f" ({event.parameters / 1e6:,.1f} M parameters)" if event.parameters else ""
                self._print(event.t, f"{event.pipeline} starts{where}: {event.task}, {event.model}{size}")
            case StepEnded():
                first = (event.pipeline, "step") not in self._last
                if self._due(event, "step") or first or event.step + 1 == self.view.pipelines[event.pipeline].steps:
                    self._step(event)
                else:
                    self._held[event.pipeline] = event
            case CheckpointSaved():
                if self._due(event, "checkpoint"):
                    self._print(event.t, f"{event.pipeline} step {event.step} saved: {short_path(event.path)}")
            case MoveMade():
                if event.move not in ROUTINE_MOVES and self._due(event, "move"):
                    self._print(event.t, describe_move(event))
            case PipelineEnded():
                if held := self._held.get(event.pipeline):
                    self._step(held)
                self._print(event.t, f"{event.pipeline} {event.reason} at step {event.step}")
            case RunEnded():
                for held in list(self._held.values()):
                    self._step(held)
                self._print(event.t, f"run {event.reason} after {duration(self.view.running_s)}")
        for note in notes:
            self._print(note.t, describe_note(note))

    def close(self) -> None:
        """Print the steps held back, if no end did; the stream stays open (it is the caller's)."""
        for held in list(self._held.values()):
            self._step(held)
        self._stream = None

    def _due(self, event: StepEnded | CheckpointSaved | MoveMade, what: str) -> bool:
        key = (event.pipeline, what)
        if abs(event.t - self._last.get(key, float("-inf"))) < self._every_s:
            return False
        self._last[key] = event.t
        return True

    def _step(self, event: StepEnded) -> None:
        self._held.pop(event.pipeline, None)
        metrics, goal = event.metrics, self.view.pipelines[event.pipeline].steps
        self._last[event.pipeline, "step"] = event.t
        fields = [f"reward {reward(metrics.get('reward_mean'))}", f"loss {number(metrics.get('loss'))}"]
        fields.append(f"{number(metrics.get('tokens_per_s'))} tok/s")
        fields.append(duration(metrics.get("time_s")))
        self._print(event.t, f"{event.pipeline} step {event.step + 1}/{goal or '?'}   {'   '.join(fields)}")

    def _print(self, t: float, text: str) -> None:
        if self._stream is None:
            return
        clock = time.strftime("%H:%M:%S", time.localtime(t))
        line = f"{clock}  " + "\n          ".join(lines(text)) + "\n"
        try:
            self._stream.write(line.encode(self._encoding, "replace").decode(self._encoding))
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def describe_note(note: Note) -> str:
    """``warning: sums: loss is NaN at step 3``; a message of several lines keeps them."""
    level = "" if note.level == "info" else f"{note.level}: "
    pipeline = f"{note.pipeline}: " if note.pipeline else ""
    return level + pipeline + "\n".join(lines(note.message)).removeprefix(pipeline)


def describe_move(move: MoveMade) -> str:
    """``merge sums on w0: tail of 2 (predicted +1.8 s, cost 0.02 s)``."""
    workers = ",".join(f"w{w}" for w in move.workers[:8]) + (",..." if len(move.workers) > 8 else "")
    parts = []
    if move.predicted_gain_s is not None:
        sign = "+" if move.predicted_gain_s >= 0 else "-"
        parts.append(f"predicted {sign}{duration(abs(move.predicted_gain_s))}")
    if move.predicted_cost_s is not None:
        parts.append(f"cost {duration(move.predicted_cost_s)}")
    predicted = f" ({', '.join(parts)})" if parts else ""
    return one_line(f"{move.move} {move.pipeline} on {workers}: {move.reason}{predicted}")
