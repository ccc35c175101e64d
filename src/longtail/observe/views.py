"""One pipeline and one worker as people see them, folded from their events (``live.py`` has the whole run).

``done`` maps the number of a finished step to its record. In events a step is named by the steps done before it (the
first is 0); people count from 1, and so do these views.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from longtail.core.events import PipelineStarted, Progress, Span, StageEntered, StepEnded
from longtail.observe.filling import StepTime, overlap
from longtail.observe.moves import Move, MoveTotals, add

WINDOW_S = 10.0
"""Utilisation and tokens/s are means over this many seconds."""
OUTSIDE_STEPS = ("load", "profile", "checkpoint")
"""Stages in which a pipeline is at no step."""
SAMPLING = ("prefill", "decode")
"""Sub-stages that tensor-parallel groups do together."""
QUIET_S = 3.0
"""A worker that has reported nothing for longer than this is idle, not merely between two reports."""


class StepRecord(NamedTuple):
    """What is kept of a finished step: NaN where its metrics lacked the value. ``alone_s``: what it was predicted to
    take with all workers to itself; ``score_s``: for how long it waited for rewards; ``ended``: Unix seconds."""

    reward: float
    time_s: float
    tokens: float
    alone_s: float
    score_s: float
    ended: float


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
    """``status`` is ``waiting``, ``running``, ``finished``, ``failed`` or ``interrupted``. One that comes again under
    the same name takes the place of the earlier one, except for the time that it took."""

    name: str
    status: str = "waiting"
    error: str | None = None
    model: str = ""
    task: str = ""
    parameters: int = 0
    step: int = 0
    """Steps done."""
    current: int = 0
    """The step being worked on, the newest if there are several; equal to ``step`` between steps."""
    steps: int | None = None
    """The goal."""
    stage: str | None = None
    under_way: dict[int, str] = field(default_factory=dict)
    """The stage of each step that is not done; several where a rollout may be ahead of training."""
    samples_done: int = 0
    """Of the current step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last finished step."""
    done: dict[int, StepRecord] = field(default_factory=dict)
    spells: list[Spell] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    time: StepTime = field(default_factory=StepTime)
    _per_step: int | None = None
    _moves: dict[int, dict[str, MoveTotals]] = field(default_factory=dict)
    """By step and kind."""
    _live: dict[int, float] = field(default_factory=dict)
    _decoded: deque[tuple[float, float, float]] = field(default_factory=deque)
    _decoded_since: float = math.inf
    _decoded_until: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each finished step that is not void, in order of steps; NaN where it had none."""
        return [record.reward for record in self.done.values()]

    @property
    def live(self) -> bool:
        """Whether more is to come of it."""
        return self.status in ("waiting", "running")

    @property
    def checkpoint(self) -> str | None:
        return self.checkpoints[-1][1] if self.checkpoints else None

    @property
    def moves(self) -> dict[str, MoveTotals]:
        """By kind: what is not routine, of steps that are not void."""
        totals: dict[str, MoveTotals] = {}
        for of_step in self._moves.values():
            for kind, more in of_step.items():
                add(totals, kind, more)
        return totals

    @property
    def samples_expected(self) -> int | None:
        """Samples of the current step: as many as the last step had, or done and live ones; None if not known yet."""
        if self._per_step is not None:
            return max(self._per_step, self.samples_done)
        live = round(sum(self._live.values()))
        return self.samples_done + live if live else None

    def tokens_per_s(self) -> float | None:
        """Decoded tokens per second in the window before the last report; the last step's where none is recent."""
        if self._decoded:
            until = self._decoded_until
            since = max(until - WINDOW_S, self._decoded_since)
            tokens = sum(n * overlap(a, b, since, until) for a, b, n in self._decoded)
            return tokens / (until - since) if until > since else None
        return self.metrics.get("tokens_per_s")

    def start(self, event: PipelineStarted) -> None:
        """It begins, or begins again."""
        self.halt(event.t)
        self.continue_after(event.step)
        if event.step == 0:  # it may be another pipeline than the one that had this name before
            self.metrics, self._per_step = {}, None
        self.status, self.error = "running", None
        self.steps, self.model, self.task, self.parameters = event.steps, event.model, event.task, event.parameters

    def restart(self) -> None:
        """The run was started anew: windows of time begin again."""
        self._decoded.clear()
        self._decoded_since, self._decoded_until = math.inf, 0.0
        if self.status != "finished":
            self.status, self.error, self.stage = "waiting", None, None

    def halt(self, t: float) -> None:
        """Nothing is under way any more."""
        self.under_way.clear()
        self.time.end(t)

    def continue_after(self, step: int) -> None:
        """Forget what later steps left, and the half-done current one."""
        self.step = self.current = step
        self.stage = None
        self.samples_done = 0
        self._live.clear()
        for kept in (self.done, self._moves):
            for late in [s for s in kept if s > step]:
                del kept[late]
        self.checkpoints = [c for c in self.checkpoints if c[0] <= step]
        self.spells = [s for s in self.spells if s.first <= step]
        for spell in self.spells:
            spell.last = min(spell.last, step)

    def enter(self, event: StageEntered, workers: int) -> None:
        """``workers``: how many the run has."""
        if event.stage in OUTSIDE_STEPS:
            self.halt(event.t)
            self.current, self.stage = event.step, event.stage
            return
        self.under_way[event.step + 1] = event.stage
        self.time.begin(event.t, workers)
        self._show_newest()
        if event.stage == "rollout":
            self.samples_done = 0
            self._live.clear()

    def _show_newest(self) -> None:
        self.current = max(self.under_way, default=self.step)
        self.stage = self.under_way.get(self.current)

    def decoded(self, event: Span) -> None:
        """Each member of a tensor-parallel group tells of all the tokens that they drew together."""
        self._decoded.append((event.start, event.end, event.tokens / event.tp))
        self._decoded_since = min(self._decoded_since, event.start)
        self._decoded_until = max(self._decoded_until, event.end)
        _prune(self._decoded, self._decoded_until)

    def live_on(self, worker: int, sequences: float) -> None:
        """So many sequences wait or run there; those of a group of tp workers count 1 / tp on each."""
        self._live[worker] = sequences

    def relocated(self) -> None:
        """Its sequences change workers: where they are will be told."""
        self._live.clear()

    def moved(self, move: Move) -> None:
        """Count a move that was carried out or refused."""
        add(self._moves.setdefault(move.told.step + 1, {}), move.told.move, MoveTotals.of(move))

    def finish_step(self, event: StepEnded) -> list[Spell]:
        """Returns the spells of non-finite metrics that begin."""
        metrics, number = event.metrics, event.step + 1
        self.metrics, self.step = metrics, number
        for done in [n for n in self.under_way if n <= number]:
            del self.under_way[done]
        if not self.under_way:
            self.time.end(event.t)
        self._show_newest()
        kept = ("reward_mean", "time_s", "tokens", "alone_s", "score_s")
        reward, time_s, tokens, alone_s, score_s = (metrics.get(name, math.nan) for name in kept)
        self.done[number] = StepRecord(reward, time_s, tokens, alone_s, score_s, ended=event.t)
        sequences = metrics.get("sequences")
        if sequences is not None and math.isfinite(sequences):
            self._per_step = round(sequences)
        return _new_spells(self.spells, number, metrics)


@dataclass
class WorkerView:
    index: int
    busy_s: float = 0.0
    """Over all starts of the run."""
    wall_s: float = 0.0
    """How long the run had this worker, over all starts that have ended; see :meth:`RunView.worker_wall_s`."""
    lost: int = 0
    work: str = ""
    """What it did last, such as ``sums decode b=2``, or ``TP2 sums decode b=2`` in a tensor-parallel group."""
    pipeline: str = ""
    """Whose work that was."""
    tp: int = 1
    """Workers of the group in which it samples."""
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
        return min(1.0, sum(s * overlap(a, b, begin, until) for a, b, s in self._spans) / (until - begin))

    def restart(self) -> None:
        """The run was started anew."""
        self.work, self.pipeline, self.tp, self.reported = "", "", 1, -math.inf
        self._spans.clear()

    def lose(self) -> None:
        self.lost += 1
        self.work, self.tp = "lost", 1

    def ran(self, event: Span) -> None:
        self.busy_s += event.busy_s
        self.reported = max(self.reported, event.end)
        if event.substage in SAMPLING:
            self.tp = event.tp
        elif event.substage != "switch":
            self.tp = 1
        self.pipeline = event.pipeline
        self.work = _work(event.pipeline, event.substage, batch=event.batch, tp=self.tp)
        self._spans.append((event.start, event.end, event.busy_s))
        _prune(self._spans, event.end)

    def progress(self, event: Progress) -> int:
        """Returns how many workers work together on what the event counts, as far as is known."""
        self.reported = max(self.reported, event.t)
        if event.pipeline == self.pipeline and event.substage not in SAMPLING:
            self.tp = 1
        if event.pipeline != self.pipeline and self.tp > 1:
            return 1  # a worker in a group works for that group alone; this one waits
        tp = self.tp if event.pipeline == self.pipeline else 1
        self.work = _work(event.pipeline, event.substage, batch=event.running, tp=tp)
        return tp


def _work(pipeline: str, substage: str, *, batch: float, tp: int) -> str:
    together = f"TP{tp} " if tp > 1 and substage in SAMPLING else ""
    return f"{together}{pipeline} {substage}" + (f" b={batch:.0f}" if substage == "decode" else "")


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


def _prune(spans: deque, until: float) -> None:
    while spans and spans[0][1] < until - WINDOW_S:
        spans.popleft()
