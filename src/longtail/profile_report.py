"""What a profile found, in figures for the terminal: times in ms, speeds in tokens or MB per second."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from longtail.costs.interference import CLASSES, SHARES, model_of
from longtail.costs.interference_file import PairTable
from longtail.costs.table import CostTable, Slowdowns
from longtail.runtime.profiler import Measured

SHOWN_BATCHES = 12


def render(measured: Measured) -> RenderableType:
    """All figures of one model."""
    table = measured.table
    name = f"{table.key.model}, {table.key.dtype}, {_workers(table)}"
    parts: list[RenderableType] = [Text(name, style="bold"), _decode(table), _figures(measured)]
    for title, slowdowns in (
        ("Times longer when in turns with other work on the same worker", table.same_worker),
        ("Times longer while the neighbours do other work", table.neighbour_worker),
    ):
        if slowdowns:
            parts += ["", Text(title, style="cyan"), _slowdowns(slowdowns)]
    return Group(*parts, "")


def render_pair(pair: PairTable) -> RenderableType:
    """What two models do to each other: in turns on one worker at equal shares of its time, and as neighbours."""
    first, second = (model_of(half.key) for half in pair.halves)
    parts: list[RenderableType] = [Text(f"{first} beside {second}", style="bold")]
    middle = len(SHARES) // 2
    for half in pair.halves:
        even = {work: {b: factors[middle] for b, factors in row.items()} for work, row in half.same_worker.items()}
        for title, slowdowns in (
            ("in turns with the other, each half of the time", even),
            ("while the neighbours do work of the other", half.neighbour_worker),
        ):
            if slowdowns:
                parts += ["", Text(f"{model_of(half.key)}: times longer {title}", style="cyan"), _slowdowns(slowdowns)]
    return Group(*parts, "")


def median_error(measured: Measured) -> float | None:
    """Of the table on decode steps that are not in it: the median of |predicted / measured - 1|; None: not checked."""
    errors = _errors(measured)
    return statistics.median(errors) if errors else None


def _errors(measured: Measured) -> list[float]:
    return sorted(abs(predicted / took - 1) for *_, took, predicted in measured.notes.get("held_out", []))


def _workers(table: CostTable) -> str:
    return (
        f"{table.key.machine}, {table.key.threads} thread{'s' * (table.key.threads > 1)} each, {table.key.communicator}"
    )


def _decode(table: CostTable) -> Table:
    """A decode step by batch: with little and with much context, for each degree."""
    shown = Table(box=None, pad_edge=False, header_style="cyan", title_justify="left")
    shown.add_column("batch", justify="right")
    contexts = table.decode[1].contexts
    short, long = contexts[0], contexts[-1]
    for degree in table.degrees:
        shown.add_column(f"TP {degree}: {short} tokens", justify="right")
        shown.add_column(f"{long:,} tokens", justify="right")
        if degree > 1:
            shown.add_column("speed-up", justify="right", style="green")
    for batch in _thinned(sorted({b for grid in table.decode.values() for b in grid.batches})):
        row = [f"{batch:,}"]
        for degree in table.degrees:
            within = batch <= table.decode[degree].batches[-1]
            seconds = [table.decode_s(degree, batch, batch * context) for context in (short, long)]
            row += [f"{1e3 * s:.2f} ms" if within else "" for s in seconds]
            if degree > 1:
                narrow = table.decode_s(1, batch, batch * long)
                row.append(f"{narrow / seconds[1]:.2f} x" if within and batch <= table.decode[1].batches[-1] else "")
        shown.add_row(*row)
    return shown


def _thinned(batches: list[int]) -> list[int]:
    """At most about ``SHOWN_BATCHES``, the powers of two first."""
    if len(batches) <= SHOWN_BATCHES:
        return batches
    return sorted({b for b in batches if b & (b - 1) == 0} | {batches[-1]})


def _figures(measured: Measured) -> Table:
    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(style="cyan", no_wrap=True)
    shown.add_column(justify="right")
    shown.add_column(style="dim")
    for row in _rows(measured):
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def _rows(measured: Measured) -> Iterator[tuple[str, str, str]]:
    """(name, value, what it means), short enough for a terminal of 80 columns."""
    table, notes = measured.table, measured.notes
    for degree in table.degrees:
        costs = table.prefill[degree]
        yield f"prefill, TP {degree}", f"{1 / costs.token_s:,.0f} tokens/s", f"in chunks of {costs.chunk_tokens[-1]:,}"
    if table.train_token_s:
        yield "training", f"{1 / table.train_token_s:,.0f} tokens/s", "each worker, forward and backward"
    switch = table.switch
    if switch.move_byte_s:
        token_bytes = table.kv_bytes * table.kv_heads
        yield "moving lanes", f"{1e-6 / switch.move_byte_s:,.0f} MB/s", f"a token has {token_bytes:,} bytes of KV"
        yield "", f"{1e3 * switch.move_s:.2f} ms", "once, if anything moves"
    if switch.handshake_s:
        yield "changing the layout", f"{1e3 * switch.handshake_s:.2f} ms", "with nothing to move"
    for batch, context, alone, together in notes.get("alone", []):
        what = f"longer with all at work: {batch} x {context:,} tokens"
        yield "sharing the memory", f"{together / alone:.2f} x", what
    for degree, why in notes.get("left_out", {}).items():
        yield f"TP {degree}", "not measured", why
    if errors := _errors(measured):
        yield "error of the table", f"{statistics.median(errors):.1%}", f"median of {len(errors)} steps not in it"
        yield "", f"{errors[(9 * len(errors)) // 10]:.1%}", "90 % are below"
    if again := notes.get("again"):
        apart = statistics.median(max(pair) / min(pair) - 1 for pair in again)
        yield "", f"{apart:.1%}", "median difference when the same steps are measured again"


def _slowdowns(slowdowns: Slowdowns) -> Table:
    names = [name for name in CLASSES if any(name in row for row in slowdowns.values())]
    shown = Table(box=None, pad_edge=False, header_style="cyan")
    shown.add_column("")
    for name in names:
        shown.add_column(f"beside {name}", justify="right")
    for work, row in slowdowns.items():
        cells = [f"{row[b]:.2f} x" if b in row else "" for b in names]
        shown.add_row(Text(work, style="cyan"), *cells)
    return shown
