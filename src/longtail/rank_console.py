"""How the ``longtail rank`` commands show things: figures on stdout, progress and notes on stderr.

Texts from data files and servers go to the terminal without control characters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from longtail.cli_common import stderr, stdout
from longtail.lengths.report import Report, figures, pairs_text, tau_text
from longtail.observe.text import one_line

if TYPE_CHECKING:
    from longtail.lengths.train import Progress as TrainProgress

SHOWN_FEATURES = 12
SHOWN_PROMPT = 60
QUIET_S = 10.0
"""Without a terminal, progress is a line so often."""


def print_report(report: Report) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    for row in figures(report):
        table.add_row(*(Text(cell) for cell in row))
    stdout.print(table)
    if len(report.by_source) > 1:
        sources = Table(box=None, pad_edge=False, header_style="cyan")
        for name in ("source", "prompts", "Kendall tau-b", "pair accuracy"):
            sources.add_column(name)
        for name, e in report.by_source.items():
            sources.add_row(*(Text(t) for t in (one_line(name), f"{e.n:,}", tau_text(e), pairs_text(e))))
        stdout.print(sources)
    stdout.print(Text(report.verdict, style="bold"))


def print_line(line: str) -> None:
    """One line on stdout, exactly as it is (no wrapping, no markup)."""
    sys.stdout.write(line + "\n")


def warn(message: str) -> None:
    stderr.print(Text("note: ", style="yellow").append(one_line(message), style="default"))


def done(message: str) -> None:
    stderr.print(Text(message, style="green"))


def print_explained(found: dict[str, Any]) -> None:
    stdout.print(Text(short(found["prompt"]), style="bold"))
    stdout.print(f"score {found['score']:.4f}   quantile {found['quantile']:.3f}")
    parts = found["contributions"]
    if parts is None:
        stdout.print("this ranker's backend cannot say what moves a score")
        return
    largest = max((abs(value) for _, value in parts), default=0.0) or 1.0
    parts = [part for part in parts if abs(part[1]) > 1e-6 * largest]
    for name, value in parts[:SHOWN_FEATURES]:
        bar = "█" * max(1, round(20 * abs(value) / largest))
        style, direction = ("green", "longer") if value > 0 else ("magenta", "shorter")
        line = Text(f"{value:+9.4f}  ").append(f"{bar:<20}", style=style).append(f"  {direction:<8}{one_line(name)}")
        stdout.print(line)
    rest = parts[SHOWN_FEATURES:]
    if rest:
        stdout.print(f"{sum(value for _, value in rest):+9.4f}  from {len(rest):,} more")


def print_flat(record: dict[str, Any]) -> None:
    """One line for every value of nested plain data."""
    flat = list(_flat(record))
    width = max(len(name) for name, _ in flat)
    for name, value in flat:
        stdout.print(Text(f"{name:<{width}}  ", style="cyan").append(one_line(_value(value)), style="default"))


def short(prompt: str) -> str:
    line = one_line(prompt[: 4 * SHOWN_PROMPT])
    return line if len(line) <= SHOWN_PROMPT and len(prompt) <= 4 * SHOWN_PROMPT else line[: SHOWN_PROMPT - 3] + "..."


def counted(number: int, noun: str) -> str:
    """``1 prompt``, ``1,200 prompts``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _flat(record: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            value = {f"{i + 1}": v for i, v in enumerate(value)}
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{one_line(key)}.")
        else:
            yield f"{prefix}{one_line(key)}", value


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value[:12]) + (f", ... ({len(value)} in all)" if len(value) > 12 else "")
    return "-" if value is None else str(value)


class Bar:
    """A progress bar on a terminal; elsewhere a plain line every ``QUIET_S`` seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=stderr, transient=True, disable=not stderr.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=None, note="")
        self._told = time.monotonic()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def update(self, done: int, total: int | None, note: str = "", waiting: str | None = None) -> None:
        text = one_line(waiting or note)
        self._progress.update(self._task, completed=done, total=total, note=text)
        if self._progress.disable and time.monotonic() - self._told >= QUIET_S and (total is None or done < total):
            self._told = time.monotonic()
            stderr.print(Text(f"{self._title} {done:,}/{total or '?'} {text}".rstrip()))

    def follow(self, progress: TrainProgress) -> None:
        """For :func:`longtail.lengths.train.train`."""
        loss = "" if progress.loss is None else f", loss {progress.loss:.4f}"
        self.update(progress.done, progress.total, f"{progress.phase}{loss}")
