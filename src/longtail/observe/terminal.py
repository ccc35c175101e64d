"""The live display: a line per pipeline, a cell per worker or tensor-parallel group, the plan, last moves and notes.

The display refreshes itself four times a second whatever the event rate; :meth:`TerminalSink.write` only folds the
event into the view. Warnings and errors are also printed above the display, where they stay.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from longtail.core.events import Event, Note, RunEnded, Sink
from longtail.observe.live import RunView
from longtail.observe.moves import describe
from longtail.observe.plain import PlainSink, describe_note
from longtail.observe.plans import describe as describe_plan
from longtail.observe.text import about, duration, number, one_line, percent, reward, sparkline
from longtail.observe.views import PipelineView

REFRESH_HZ = 4
NAME_WIDTH = 16
CURVE_WIDTH = 24
WORKER_LINES = 8
PIPELINE_LINES = 16
"""Of more than so many pipelines those that are over are left out, the oldest first."""
STATUS_STYLE = {"failed": "red", "interrupted": "yellow", "finished": "green", "waiting": "dim"}
LEVEL_STYLE = {"error": "red", "warning": "yellow"}


def console_sink(stream: TextIO | None = None, *, view: RunView | None = None) -> Sink:
    """The live display if ``stream`` (default: standard output) is a terminal that can show it, else plain lines.

    ``view`` is the run so far, so that a resumed run shows its whole reward curve.
    """
    stream = sys.stdout if stream is None else stream
    if stream.isatty() and (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8":
        console = Console(file=stream)
        if console.is_terminal and not console.is_dumb_terminal:
            return TerminalSink(console, view=view)
    return PlainSink(stream, view=view)


class TerminalSink:
    """Draws the run on a rich console until it ends (or :meth:`close`), and leaves the last state on the screen.

    ``clock`` gives Unix seconds. A terminal that goes away switches the display off, not the run.
    """

    def __init__(
        self, console: Console, *, view: RunView | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.view = RunView() if view is None else view
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._closed = False

    def write(self, event: Event) -> None:
        with self._lock:
            notes = self.view.apply(event)
        if self._closed:
            return
        try:
            if self._live is None:
                self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=REFRESH_HZ)
                self._live.start()
            for note in notes:
                if note.level in LEVEL_STYLE:
                    # Not under self._lock: printing redraws the display, which takes it.
                    self._console.print(Text(describe_note(note), style=LEVEL_STYLE[note.level]))
        except (OSError, ValueError):
            self.close()
        if isinstance(event, RunEnded):
            self.close()

    def close(self) -> None:
        """Draw once more and give the terminal back; safe to call twice."""
        self._closed = True
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def _draw(self) -> RenderableType:
        with self._lock:
            return draw(self.view, self._console.width, self._clock())


def draw(view: RunView, width: int, now: float) -> Group:
    """The display at one moment, ``width`` columns wide; lines never wrap, except a failed pipeline's error."""
    lines = [_header(view)]
    lines.extend(_pipelines(view, width))
    lines.extend(_workers(view, width, now))
    lines.extend([_labelled("plan", describe_plan(view.plan))] if view.plan is not None else [])
    lines.extend(_last_moves(view))
    lines.extend(_last_notes(view))
    for line in lines:
        if line.no_wrap:
            line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _line(text: str = "", style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _header(view: RunView) -> Text:
    devices = ", ".join(dict.fromkeys(view.devices))
    line = _line("longtail ", "bold").append(
        f"{view.version}   {len(view.devices)} workers ({devices})   {view.run}   {duration(view.running_s)}",
        "not bold",
    )
    return line.append(f"   {view.reason}") if view.reason else line


def _pipelines(view: RunView, width: int) -> list[Text]:
    """Aligned columns; the reward curves get the room that the others leave."""
    pipelines = _shown(list(view.pipelines.values()))
    name_width = min(NAME_WIDTH, max((len(p.name) for p in pipelines), default=0))
    goal_width = max((len(str(p.steps or "?")) for p in pipelines), default=0)
    fixed = name_width + 2 * goal_width + 53
    curve_width = min(CURVE_WIDTH, width - fixed, max((len(p.done) for p in pipelines), default=0))
    lines = []
    for p in pipelines:
        name = p.name if len(p.name) <= name_width else p.name[: name_width - 1] + "…"
        step = p.current if p.status == "running" else p.step
        line = _line(f"{name:<{name_width}}", "bold")
        line.append(f"  step {step:>{goal_width}}/{p.steps or '?':<{goal_width}}", "not bold")
        line.append(f"  reward {reward(p.metrics.get('reward_mean')):>5} ", "not bold")
        line.append(f"{sparkline(p.rewards, curve_width):<{max(0, curve_width)}}", "cyan not bold")
        line.append(f"  {_stage(p):<15}", f"{STATUS_STYLE.get(p.status, 'none')} not bold")
        line.append(f"{number(p.tokens_per_s()):>7} tok/s", "not bold")
        lines.append(line)
        if p.error is not None:
            lines.append(Text(f"  {about(p.name, p.error)}", style="red"))
    if hidden := len(view.pipelines) - len(pipelines):
        lines.append(_line(f"and {hidden} more that are over", "dim"))
    return lines


def _shown(pipelines: list[PipelineView]) -> list[PipelineView]:
    over = [p.name for p in pipelines if not p.live]
    hidden = over[: max(0, len(pipelines) - PIPELINE_LINES)]
    return [p for p in pipelines if p.name not in hidden]


def _stage(p: PipelineView) -> str:
    if not p.live:
        return p.status
    if p.stage is None:
        return "waiting" if p.status == "waiting" else "" if p.done else "starting"
    earlier = [stage for number, stage in p.under_way.items() if number != p.current]
    return " + ".join([_newest_stage(p), *earlier])


def _newest_stage(p: PipelineView) -> str:
    if p.stage == "rollout" and p.samples_expected:
        return f"rollout {p.samples_done}/{p.samples_expected}"
    return p.stage or ""


def _workers(view: RunView, width: int, now: float) -> list[Text]:
    cells = []
    for group in view.groups(now):
        busy = percent(_mean([view.utilisation(index, now) for index in group]))
        cells.append(f"{_names(group)} {busy:>5}  {view.work(group[0], now)}".rstrip())
    if not cells:
        return []
    cell_width = min(max(map(len, cells)), 34) + 3
    per_line = max(1, (width + 3) // cell_width)
    shown = cells[: per_line * WORKER_LINES]
    lines = []
    for i in range(0, len(shown), per_line):
        row = shown[i : i + per_line]
        lines.append(_line("".join(f"{cell[: cell_width - 3]:<{cell_width}}" for cell in row).rstrip(), "blue"))
    if hidden := cells[len(shown) :]:
        everyone = percent(_mean([view.utilisation(index, now) or 0.0 for index in view.workers]))
        lines.append(_line(f"and {len(hidden)} more; all workers {everyone}", "blue"))
    return lines


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _names(group: tuple[int, ...]) -> str:
    """``w0``, ``w0+w1``, ``w0-w7``."""
    names = [f"w{index}" for index in group]
    return "+".join(names) if len(names) <= 2 else f"{names[0]}-{names[-1]}"


def _last_moves(view: RunView, most: int = 2) -> list[Text]:
    moves = list(view.moves)[-most:]
    return [_labelled("moves" if i == 0 else "", describe(move)) for i, move in enumerate(moves)]


def _last_notes(view: RunView, most: int = 2) -> list[Text]:
    notes: list[Note] = [note for note in view.notes if note.level not in LEVEL_STYLE][-most:]
    return [_labelled("notes" if i == 0 else "", one_line(describe_note(note))) for i, note in enumerate(notes)]


def _labelled(label: str, text: str) -> Text:
    return _line(f"{label:<7} ", "dim").append(text, "not dim")
