"""Progress as plain lines, for logs and pipes: no escape codes, and never more than a reader can follow."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TextIO

from longtail.core.events import (
    CheckpointSaved,
    Event,
    MoveEnded,
    MoveMade,
    Note,
    PipelineEnded,
    PipelineStarted,
    Planned,
    Rollback,
    RunEnded,
    RunStarted,
    StageEntered,
    StepEnded,
)
from longtail.observe.live import RunView
from longtail.observe.moves import ROUTINE_MOVES, SWITCHES, Move, MoveTotals, account, add, describe, listed
from longtail.observe.plans import describe as describe_plan
from longtail.observe.text import duration, lines, number, reward, short_path

MOVES_IN_FULL = 3
"""So many moves of a pipeline within ``MOVES_EVERY_S`` seconds have lines of their own, what follows is counted."""
MOVES_EVERY_S = 60.0
PLANS_EVERY_S = 10.0


class PlainSink:
    """One line per finished step and pipeline, at most one each ``every_s`` seconds of the run's own time, but always
    a pipeline's first and last step; checkpoints likewise. Frequent moves are counted (:class:`MoveLines`). How
    pipelines share the workers is told when it changes between side by side and in turns, or other pipelines share.
    Notes, starts and ends are never left out.

    ``view`` is the run so far (of a resumed run). A closed pipe switches the sink off.
    """

    def __init__(self, stream: TextIO | None = None, *, view: RunView | None = None, every_s: float = 1.0) -> None:
        self._stream: TextIO | None = sys.stdout if stream is None else stream
        self._encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self.view = RunView() if view is None else view
        self._every_s = every_s
        self._last: dict[tuple[str, str], float] = {}
        self._held: dict[str, StepEnded] = {}
        self._moves: dict[str, MoveLines] = {}
        self._told: tuple[str, set[str]] | None = None
        self._told_at = float("-inf")

    def write(self, event: Event) -> None:
        """Print what the event is worth; never raises because of the stream."""
        notes = self.view.apply(event)
        match event:
            case RunStarted():
                self._moves.clear()
                self._told, self._told_at = None, float("-inf")
                devices = ", ".join(dict.fromkeys(event.devices))
                again = "   (resumed)" if event.resumed else ""
                self._print(
                    event.t, f"longtail {event.version}   {event.workers} workers ({devices})   {event.run}{again}"
                )
            case Rollback():
                self._moves.pop(event.pipeline, None)  # void steps are not counted
            case PipelineStarted():
                self._moves.pop(event.pipeline, None)
                self._last.pop((event.pipeline, "step"), None)
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
            case StageEntered(stage="profile"):
                self._print(event.t, f"{event.pipeline} measures what its work costs here")
            case MoveMade() | MoveEnded():
                if event.move not in ROUTINE_MOVES and self.view.latest_move is not None:
                    told = self._moves.setdefault(event.pipeline, MoveLines(event.pipeline))
                    self._print_if(event.t, told.line(self.view.latest_move))
            case Planned():
                self._plan(event)
            case PipelineEnded():
                self._say_held(event.pipeline, t=event.t)
                self._print(event.t, f"{event.pipeline} {event.reason} at step {event.step}")
            case RunEnded():
                self._say_held(*self.view.pipelines, t=event.t)
                self._print(event.t, f"run {event.reason} after {duration(self.view.running_s)}")
        for note in notes:
            self._print(note.t, describe_note(note))

    def close(self) -> None:
        """Print what was held back, if no end did; the stream stays open (it is the caller's)."""
        self._say_held(*self.view.pipelines, t=self.view.now)
        self._stream = None

    def _say_held(self, *pipelines: str, t: float) -> None:
        for pipeline in pipelines:
            if held := self._held.get(pipeline):
                self._step(held)
            if moves := self._moves.pop(pipeline, None):
                self._print_if(t, moves.rest(t))

    def _due(self, event: StepEnded | CheckpointSaved, what: str) -> bool:
        key = (event.pipeline, what)
        if abs(event.t - self._last.get(key, float("-inf"))) < self._every_s:
            return False
        self._last[key] = event.t
        return True

    def _plan(self, event: Planned) -> None:
        news = event.mode, set(event.rates)
        if news != self._told and event.t - self._told_at >= PLANS_EVERY_S:
            self._told, self._told_at = news, event.t
            self._print(event.t, describe_plan(event))

    def _step(self, event: StepEnded) -> None:
        self._held.pop(event.pipeline, None)
        metrics, goal = event.metrics, self.view.pipelines[event.pipeline].steps
        self._last[event.pipeline, "step"] = event.t
        fields = [f"reward {reward(metrics.get('reward_mean'))}", f"loss {number(metrics.get('loss'))}"]
        fields.append(f"{number(metrics.get('tokens_per_s'))} tok/s")
        fields.append(duration(metrics.get("time_s")))
        self._print(event.t, f"{event.pipeline} step {event.step + 1}/{goal or '?'}   {'   '.join(fields)}")

    def _print_if(self, t: float, text: str) -> None:
        if text:
            self._print(t, text)

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


class MoveLines:
    """Which moves of a pipeline get lines of their own, one when they are decided and one when they are over; the
    others are counted, and told as one line each ``MOVES_EVERY_S`` seconds of the run's own time."""

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._recent: deque[float] = deque(maxlen=MOVES_IN_FULL)
        self._told: set[Move] = set()
        self._counted: dict[str, MoveTotals] = {}
        self._only: Move | None = None
        self._since = 0.0

    def line(self, move: Move) -> str:
        """What to say of a move that was decided, or is over, just now; may be empty."""
        t = move.told.t
        if move.ended is not None:
            if move not in self._told:
                return self._count(move, t)
            self._told.remove(move)
            return describe(move)
        often = len(self._recent) == MOVES_IN_FULL and t - self._recent[0] < MOVES_EVERY_S
        self._recent.append(t)
        if not often:
            if move.told.move in SWITCHES:
                self._told = {m for m in self._told if m.told.step == move.told.step} | {move}
            return describe(move)
        return "" if move.told.move in SWITCHES else self._count(move, t)

    def rest(self, t: float) -> str:
        """What was counted and not yet told; may be empty."""
        counted, only, self._counted, self._only = self._counted, self._only, {}, None
        if only is not None:
            return describe(only)
        sums = []
        for kind, total in listed(counted).items():
            known = account(total)
            sums.append(f"{kind} {total.count}" + (f" ({known})" if known else ""))
        return f"{self._pipeline} in the last {duration(t - self._since)}: {', '.join(sums)}" if sums else ""

    def _count(self, move: Move, t: float) -> str:
        if not self._counted:
            self._since = t
        self._only = None if self._counted else move
        add(self._counted, move.told.move, MoveTotals.of(move))
        return self.rest(t) if t - self._since >= MOVES_EVERY_S else ""
