"""Decode steps by batch as one PNG: an axes for each model, a colour for each tensor-parallel degree."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from longtail.costs.table import CostTable
from longtail.lengths.report_plot import COLOURS, DPI, GRID, INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 6.5, 5.0


def draw(tables: Sequence[CostTable]) -> bytes:
    """The figure as PNG bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {"font.size": 10.5, "axes.edgecolor": MUTED, "text.color": INK, "axes.labelcolor": INK}
    style |= {"xtick.color": MUTED, "ytick.color": MUTED, "axes.titlesize": 11.5, "axes.titlelocation": "left"}
    with rc_context(style):
        figure = Figure(figsize=(WIDTH_IN * len(tables), HEIGHT_IN), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
            _draw(axes, table)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()


def _draw(axes: Axes, table: CostTable) -> None:
    """Lines are what the table says, points what was measured."""
    axes.set_title(f"{table.key.model}, {table.key.dtype}".replace("$", r"\$"))
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("ms per decode step")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for degree, colour in zip(table.degrees, COLOURS, strict=False):
        grid = table.decode[degree]
        n = np.arange(1, grid.batches[-1] + 1)
        for at, look in ((0, "-"), (-1, "--")):
            context = grid.contexts[at]
            line = grid.at(n.astype(float))
            seconds = line.base_s + line.context_s * n * context
            label = f"TP {degree}, {context:,} tokens each"
            axes.plot(n, 1e3 * seconds, look, color=colour, linewidth=1.6, label=label)
            axes.scatter(grid.batches, [1e3 * row[at] for row in grid.seconds], s=14, color=colour, zorder=3)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
