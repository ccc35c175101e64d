"""The table at the end of a run, from its events: right across resumes and rollbacks, and what sharing brought.

Void steps count nowhere. A step's time is its ``time_s`` metric. Workers' idle share is over the time in which the
run ran, without the gaps between its starts; work that a rollback made void was work, also where it filled what another
pipeline left idle.

A run with one pipeline has shared nothing, and its table has nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from longtail.core.events import Event
from longtail.observe.live import RunView
from longtail.observe.moves import ROUTINE_MOVES, MoveTotals, account, add, count, listed
from longtail.observe.plans import PlanSummary
from longtail.observe.plans import account as account_of_plans
from longtail.observe.text import about, duration, number, percent, reward, short_path
from longtail.observe.views import PipelineView, StepRecord

POSSIBLE = 1.05
"""What steps would take alone, over the seconds of their work and rewards: more is a cost table gone wrong."""


@dataclass(frozen=True, kw_only=True)
class PipelineSummary:
    """``reward_first`` and ``reward_last`` are means over the first and last 10 % of ``steps`` (at least one step);
    None where there is none. ``step_alone_s`` is the mean of what steps were predicted to take with all workers to
    themselves, ``slowdown`` how many times longer the same steps took. ``idle_filled``: of the worker time that the
    pipeline left idle during its steps, the share that others used. ``moves`` are sums by kind. ``nonfinite`` says
    which metrics were NaN or infinite, and when."""

    name: str
    status: str
    error: str | None
    steps: int
    steps_goal: int | None
    reward_first: float | None
    reward_last: float | None
    step_time_s: float | None
    step_alone_s: float | None
    slowdown: float | None
    idle_filled: float | None
    tokens_per_s: float | None
    checkpoint: str | None
    moves: dict[str, MoveTotals]
    nonfinite: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """``reason`` is None if the run was killed (or still runs). ``idle`` is each worker's idle share, 0 to 1.
    ``together``: the throughput of all pipelines over that of taking turns, each with all workers to itself; None with
    one pipeline, unless it is known of every step what it would have taken, and where that cannot be true: with all
    workers to itself no step takes longer than its work does one piece after the other, and its rewards."""

    run: str
    reason: str | None
    starts: int
    running_s: float
    pipelines: tuple[PipelineSummary, ...]
    idle: dict[int, float]
    together: float | None
    plans: PlanSummary | None

    @property
    def shared(self) -> bool:
        """Whether more than one pipeline has finished a step."""
        return sum(p.step_time_s is not None for p in self.pipelines) > 1

    @property
    def idle_mean(self) -> float | None:
        return sum(self.idle.values()) / len(self.idle) if self.idle else None

    @property
    def moves(self) -> dict[str, MoveTotals]:
        """Of all pipelines, by kind."""
        totals: dict[str, MoveTotals] = {}
        for pipeline in self.pipelines:
            for kind, more in pipeline.moves.items():
                add(totals, kind, more)
        return listed(totals)


def summarise(events: Iterable[Event] | RunView) -> RunSummary:
    """The summary of a run from its events (or from the view that has already folded them)."""
    view = events if isinstance(events, RunView) else RunView.of(events)
    idle = {}
    for index in sorted(view.workers):
        if wall_s := view.worker_wall_s(index):
            idle[index] = min(1.0, max(0.0, 1 - view.workers[index].busy_s / wall_s))
    ran = [p for p in view.pipelines.values() if p.done]
    return RunSummary(
        run=view.run,
        reason=view.reason,
        starts=view.starts,
        running_s=view.running_s,
        pipelines=tuple(_pipeline(p, view.now, alone=len(ran) < 2) for p in view.pipelines.values()),
        idle=idle,
        together=_together(ran) if len(ran) > 1 else None,
        plans=view.plans.summary(),
    )


def _pipeline(p: PipelineView, now: float, *, alone: bool) -> PipelineSummary:
    records = list(p.done.values())
    tenth = max(1, round(len(records) / 10))
    timed = [r for r in records if math.isfinite(r.time_s)]
    counted = [r for r in timed if math.isfinite(r.tokens)]
    time_s = _lasted_s(counted)
    compared = [r for r in timed if math.isfinite(r.alone_s) and r.alone_s > 0]
    return PipelineSummary(
        name=p.name,
        status=p.status,
        error=p.error,
        steps=p.step,
        steps_goal=p.steps,
        reward_first=_mean([r.reward for r in records[:tenth]]),
        reward_last=_mean([r.reward for r in records[-tenth:]]),
        step_time_s=_mean([r.time_s for r in timed]),
        step_alone_s=_mean([r.alone_s for r in records]),
        slowdown=sum(r.time_s for r in compared) / sum(r.alone_s for r in compared) if compared else None,
        idle_filled=None if alone else p.time.filled(now),
        tokens_per_s=sum(r.tokens for r in counted) / time_s if time_s else None,
        checkpoint=p.checkpoint,
        moves=p.moves,
        nonfinite=tuple(map(str, p.spells)),
    )


def _mean(values: list[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def _together(pipelines: list[PipelineView]) -> float | None:
    """What steps would have taken alone, over the time in which at least one of them was under way."""
    records = [r for p in pipelines for r in p.done.values()]
    if not all(math.isfinite(r.alone_s) and math.isfinite(r.time_s) for r in records):
        return None
    for p in pipelines:
        longest_s = p.time.own_s + sum(r.score_s for r in p.done.values() if math.isfinite(r.score_s))
        if p.time.own_s > 0 and sum(r.alone_s for r in p.done.values()) > POSSIBLE * longest_s:
            return None
    wall_s = _lasted_s(records)
    return sum(r.alone_s for r in records) / wall_s if wall_s > 0 else None


def _lasted_s(records: list[StepRecord]) -> float:
    """Seconds in which at least one of these steps was under way."""
    lasted_s, until = 0.0, -math.inf
    for since, ended in sorted((r.ended - r.time_s, r.ended) for r in records):
        lasted_s += max(0.0, ended - max(since, until))
        until = max(until, ended)
    return lasted_s


def render(summary: RunSummary) -> RenderableType:
    """For a rich console: the table (where workers were shared, moves and checkpoints are a table of their own), lines
    on sharing, on the workers and on each kind of move of which something is known, a line per failed pipeline and per
    non-finite metric."""
    figures, words = _figures(summary), _moves_and_checkpoints(summary)
    lines: list[RenderableType] = []
    if summary.shared:
        lines += [_table(summary, figures, {}), _table(summary, {}, words), *_sharing_lines(summary)]
    else:
        lines.append(_table(summary, figures, words))
    lines.append(_workers_line(summary))
    lines.extend(Text(f"{kind}: {known}") for kind, total in summary.moves.items() if (known := account(total)))
    for p in summary.pipelines:
        if p.error is not None:
            lines.append(Text(f"{p.name} {p.status}: {about(p.name, p.error)}", style="red"))
        lines.extend(Text(f"{p.name}: {spell}", style="yellow") for spell in _shown(p.nonfinite))
    return Group(*lines)


def _table(summary: RunSummary, figures: dict[str, list[str]], words: dict[str, list[Text]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("pipeline", overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for name in words:
        table.add_column(name, overflow="fold")
    for p, *row in zip(summary.pipelines, *figures.values(), *words.values(), strict=True):
        table.add_row(p.name, *row)
    return table


def _figures(summary: RunSummary) -> dict[str, list[str]]:
    """Columns; those on sharing where something is known of it."""
    pipelines = summary.pipelines
    columns = {
        "steps": [
            str(p.steps) if p.steps == p.steps_goal or p.steps_goal is None else f"{p.steps}/{p.steps_goal}"
            for p in pipelines
        ],
        "reward": [f"{reward(p.reward_first)} → {reward(p.reward_last)}" for p in pipelines],
    }
    took = [duration(p.step_time_s) for p in pipelines]
    if summary.shared and any(p.slowdown is not None for p in pipelines):
        columns["step alone"] = [duration(p.step_alone_s) for p in pipelines]
        columns["shared"] = took
        columns["slowdown"] = ["-" if p.slowdown is None else f"{p.slowdown:.2f}x" for p in pipelines]
    else:
        columns["step time"] = took
    if any(p.idle_filled is not None for p in pipelines):
        columns["idle filled"] = [percent(p.idle_filled) for p in pipelines]
    columns["tok/s"] = [number(p.tokens_per_s) for p in pipelines]
    return columns


def _moves_and_checkpoints(summary: RunSummary) -> dict[str, list[Text]]:
    """Columns. That a rollout stayed as it was is of interest where there were others to share with."""
    hidden = set() if summary.shared else ROUTINE_MOVES
    moves = [count({k: total for k, total in p.moves.items() if k not in hidden}) for p in summary.pipelines]
    checkpoints = [Text(short_path(p.checkpoint) if p.checkpoint else "-") for p in summary.pipelines]
    return ({"moves": [Text(text or "-") for text in moves]} if any(moves) else {}) | {"checkpoint": checkpoints}


def _sharing_lines(summary: RunSummary) -> list[Text]:
    lines, plans = [], summary.plans
    predicted = plans.predicted if plans is not None else None
    if summary.together is not None:
        foretold = f" (predicted {predicted:.2f}x)" if predicted is not None else ""
        lines.append(Text(f"together {summary.together:.2f}x the throughput of taking turns{foretold}", style="bold"))
    elif predicted is not None:
        lines.append(Text(f"together predicted {predicted:.2f}x the throughput of taking turns"))
    if plans is not None:
        lines.append(Text(account_of_plans(plans)))
    return lines


def _workers_line(summary: RunSummary) -> Text:
    what, of = ("busy", 1.0) if summary.shared else ("idle", 0.0)
    each = ", ".join(f"w{index} {percent(abs(of - idle))}" for index, idle in list(summary.idle.items())[:16])
    if len(summary.idle) > 16:
        each += ", ..."
    starts = f" in {summary.starts} starts" if summary.starts > 1 else ""
    mean = summary.idle_mean
    workers = f"workers {what} {percent(abs(of - mean))} ({each})   " if mean is not None else ""
    return Text(f"{workers}ran {duration(summary.running_s)}{starts}")


def _shown(spells: tuple[str, ...], most: int = 4) -> list[str]:
    hidden = len(spells) - most
    return [*spells[:most], *([f"and {hidden} more times" if hidden > 1 else spells[most]] if hidden > 0 else [])]
