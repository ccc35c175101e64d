"""The table at the end of a run, from its events: right across resumes and rollbacks.

Void steps count nowhere. A step's time is its ``time_s`` metric. Workers' idle share is over the time in which the
run ran, without the gaps between its starts; work that a rollback made void was work.
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
from longtail.observe.moves import MoveTotals, account, add, count
from longtail.observe.text import about, duration, number, percent, reward, short_path
from longtail.observe.views import PipelineView


@dataclass(frozen=True, kw_only=True)
class PipelineSummary:
    """``reward_first`` and ``reward_last`` are means over the first and last 10 % of ``steps`` (at least one step);
    None where there is none. ``moves`` are sums by kind. ``nonfinite`` says which metrics were NaN or infinite, and
    when."""

    name: str
    status: str
    error: str | None
    steps: int
    steps_goal: int | None
    reward_first: float | None
    reward_last: float | None
    step_time_s: float | None
    tokens_per_s: float | None
    checkpoint: str | None
    moves: dict[str, MoveTotals]
    nonfinite: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """``reason`` is None if the run was killed (or still runs). ``idle`` is each worker's idle share, 0 to 1."""

    run: str
    reason: str | None
    starts: int
    running_s: float
    pipelines: tuple[PipelineSummary, ...]
    idle: dict[int, float]

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
        return totals


def summarise(events: Iterable[Event] | RunView) -> RunSummary:
    """The summary of a run from its events (or from the view that has already folded them)."""
    view = events if isinstance(events, RunView) else RunView.of(events)
    idle = {}
    for index in sorted(view.workers):
        if wall_s := view.worker_wall_s(index):
            idle[index] = min(1.0, max(0.0, 1 - view.workers[index].busy_s / wall_s))
    return RunSummary(
        run=view.run,
        reason=view.reason,
        starts=view.starts,
        running_s=view.running_s,
        pipelines=tuple(_pipeline(p) for p in view.pipelines.values()),
        idle=idle,
    )


def _pipeline(p: PipelineView) -> PipelineSummary:
    records = list(p.done.values())
    tenth = max(1, round(len(records) / 10))
    timed = [r for r in records if math.isfinite(r.time_s)]
    counted = [r for r in timed if math.isfinite(r.tokens)]
    time_s = sum(r.time_s for r in counted)
    return PipelineSummary(
        name=p.name,
        status=p.status,
        error=p.error,
        steps=p.step,
        steps_goal=p.steps,
        reward_first=_mean([r.reward for r in records[:tenth]]),
        reward_last=_mean([r.reward for r in records[-tenth:]]),
        step_time_s=_mean([r.time_s for r in timed]),
        tokens_per_s=sum(r.tokens for r in counted) / time_s if time_s else None,
        checkpoint=p.checkpoint,
        moves=p.moves,
        nonfinite=tuple(map(str, p.spells)),
    )


def _mean(values: list[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else None


def render(summary: RunSummary) -> RenderableType:
    """For a rich console: the table, a line on the workers and on each kind of move whose outcome is known, a line per
    failed pipeline and per non-finite metric."""
    moved = any(count(p.moves) for p in summary.pipelines)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("pipeline", overflow="fold")
    for name in ("steps", "reward", "step time", "tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    if moved:
        table.add_column("moves", overflow="fold")
    table.add_column("checkpoint", overflow="fold")
    for p in summary.pipelines:
        table.add_row(
            p.name,
            str(p.steps) if p.steps == p.steps_goal or p.steps_goal is None else f"{p.steps}/{p.steps_goal}",
            f"{reward(p.reward_first)} → {reward(p.reward_last)}",
            duration(p.step_time_s),
            number(p.tokens_per_s),
            *([count(p.moves) or "-"] if moved else []),
            Text(short_path(p.checkpoint) if p.checkpoint else "-"),
        )
    lines: list[RenderableType] = [table, _workers_line(summary)]
    lines.extend(Text(f"{kind}: {known}") for kind, total in summary.moves.items() if (known := account(total)))
    for p in summary.pipelines:
        if p.error is not None:
            lines.append(Text(f"{p.name} {p.status}: {about(p.name, p.error)}", style="red"))
        lines.extend(Text(f"{p.name}: {spell}", style="yellow") for spell in _shown(p.nonfinite))
    return Group(*lines)


def _workers_line(summary: RunSummary) -> Text:
    each = ", ".join(f"w{index} {percent(idle)}" for index, idle in list(summary.idle.items())[:16])
    if len(summary.idle) > 16:
        each += ", ..."
    starts = f" in {summary.starts} starts" if summary.starts > 1 else ""
    workers = f"workers idle {percent(summary.idle_mean)} ({each})   " if summary.idle else ""
    return Text(f"{workers}ran {duration(summary.running_s)}{starts}")


def _shown(spells: tuple[str, ...], most: int = 4) -> list[str]:
    hidden = len(spells) - most
    return [*spells[:most], *([f"and {hidden} more times" if hidden > 1 else spells[most]] if hidden > 0 else [])]
