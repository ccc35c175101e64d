"""The plots of a report as one PNG: length by predicted quantile, confusion of deciles, calibration."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from longtail.lengths.evaluate import DECILES, Evaluation
from longtail.lengths.report import Report, pairs_text, tau_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID, MAIN, BAND = "#1d2733", "#5b6875", "#e3e8ed", "#2a6f97", "#a9cbe0"
COLOURS = ("#2a6f97", "#e07a2f", "#4f9d69", "#a4508b", "#8a6d3b", "#5b6875")
MOST_POINTS = 4000
"""More are thinned out evenly, so that a large set stays readable."""
SIZE_IN, DPI = (15.0, 5.4), 150


def draw(report: Report) -> bytes:
    """The figure as PNG bytes; parts that are undefined say why in their place."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {"font.size": 10.5, "axes.edgecolor": MUTED, "text.color": INK, "axes.labelcolor": INK}
    style |= {"xtick.color": MUTED, "ytick.color": MUTED, "axes.titlesize": 11.5, "axes.titlelocation": "left"}
    with rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a source's name may be in any script
        figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(_title(report), x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.25, 1.1, 1])
        _points(left, report)
        bar = _confusion(middle, report.overall)
        if bar is not None:
            ticks = np.arange(0, bar.norm.vmax, 0.05 if bar.norm.vmax <= 0.4 else 0.2)
            figure.colorbar(bar, ax=middle, fraction=0.046, pad=0.03, ticks=ticks, format=lambda v, _: f"{v:.0%}")
        _calibration(right, report.overall)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=DPI)
    return out.getvalue()


def _title(report: Report) -> str:
    e, names = report.overall, report.data.source_names
    what = names[0] if len(names) == 1 else f"{len(names)} sources"
    shown = (what if len(what) <= 60 else what[:57] + "...").replace("$", r"\$")
    pairs = f"   pair accuracy {pairs_text(e)}" if e.pair_accuracy is not None else ""
    return f"{shown}: {e.n:,} prompts   tau-b {tau_text(e)}{pairs}"


def _points(axes: Axes, report: Report) -> None:
    data = report.data
    _frame(axes, "Length by predicted quantile", "predicted quantile", f"true length ({data.unit})")
    mixed = len(set(data.units)) > 1
    if mixed:
        axes.set_ylabel("true length (each source's own unit)")
    if not len(data):
        _say(axes, "no rows")
        return
    from matplotlib.ticker import SymmetricalLogLocator

    step = -(-len(data) // MOST_POINTS)
    size, alpha = (11, 0.45) if len(data) <= 1000 else (6, 0.3)
    q, y = np.asarray(report.quantiles, float), data.lengths
    for number, name in enumerate(data.source_names):
        for cut in (False, True):
            rows = np.flatnonzero((data.sources == number) & (data.censored == cut))[::step]
            if not len(rows):
                continue
            colour = COLOURS[number % len(COLOURS)]
            label = (name if len(name) <= 32 else name[:29] + "...").replace("$", r"\$") if not cut else "cut off"
            look: dict[str, Any] = {"marker": "^", "facecolors": "none", "edgecolors": colour} if cut else {"c": colour}
            axes.scatter(
                q[rows], y[rows], s=size, alpha=alpha, linewidths=0.7, label=label if not cut else None, **look
            )
            if cut:
                axes.scatter([], [], s=14, label=f"{name[:24]}: cut off".replace("$", r"\$"), linewidths=0.7, **look)
    if not mixed:
        _median_band(axes, q, y)
    positive = y[y > 0]
    if len(positive) and positive.max() / positive.min() > 20:
        threshold = max(1.0, float(positive.min()))
        axes.set_yscale("symlog", linthresh=threshold)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(linthresh=threshold, base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(bottom=0 if not len(positive) or not y.min() > 0 else float(y.min()) * 0.8)
    _legend(axes, columns=2)


def _median_band(axes: Axes, q: np.ndarray, y: np.ndarray) -> None:
    """Median and the middle 80 % of the lengths, for each tenth of the prompts by predicted quantile."""
    if len(q) < 5 * DECILES or np.ptp(q) == 0:
        return
    parts = np.array_split(np.argsort(q, kind="stable"), DECILES)
    x = [float(q[p].mean()) for p in parts]
    low, middle, high = np.array([np.quantile(y[p], [0.1, 0.5, 0.9]) for p in parts]).T
    axes.fill_between(x, low, high, color=BAND, alpha=0.35, linewidth=0, label="middle 80 %")
    axes.plot(x, middle, color=INK, linewidth=2, label="median")


def _confusion(axes: Axes, e: Evaluation) -> Any:
    _frame(axes, "Deciles: where predictions end up", "true decile (longest right)", "predicted decile")
    if e.deciles is None:
        _say(axes, e.reasons["deciles"])
        return None
    counts = np.array(e.deciles, float)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    axes.grid(False)
    top = max(0.2, float(np.quantile(shares, 0.98)))
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=top, origin="lower", aspect="auto")
    ticks = np.arange(DECILES)
    axes.set_xticks(ticks, [str(i + 1) for i in ticks])
    axes.set_yticks(ticks, [str(i + 1) for i in ticks])
    for i, j in np.argwhere(shares >= 0.005):
        colour = "white" if shares[i, j] > 0.45 * top else INK
        axes.text(j, i, f"{100 * shares[i, j]:.0f}", ha="center", va="center", fontsize=8, color=colour)
    return image


def _calibration(axes: Axes, e: Evaluation) -> None:
    _frame(axes, "Calibration of the quantiles", "predicted quantile", "mean true quantile")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    if e.calibration is None:
        _say(axes, e.reasons["calibration"])
        return
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1, label="perfect ranker")
    axes.axhline(0.5, color=MUTED, linestyle=":", linewidth=1, label="knows nothing")
    bins = np.array([(b.predicted, b.actual, b.n) for b in e.calibration.bins if b.n], float)
    axes.plot(bins[:, 0], bins[:, 1], color=MAIN, linewidth=1.5)
    sizes = 6 + 400 * bins[:, 2] / e.n
    axes.scatter(bins[:, 0], bins[:, 1], s=sizes, color=MAIN, zorder=3, label="these prompts (area: how many)")
    _legend(axes, columns=2)
    text = f"error {e.calibration.mean_error:.3f}\nspread {e.calibration.uniform_error:.3f}"
    axes.text(0.97, 0.04, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color=MUTED)


def _legend(axes: Axes, *, columns: int) -> None:
    """Below the axes, where it hides no point."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns, frameon=False, fontsize=9)


def _frame(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, wrap=True)
