"""A report on a ranker: ``report.json`` (strict JSON), ``report.png``, and ``report.html`` that needs nothing else.

Times in milliseconds. The page holds no script and loads nothing.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from longtail.core.errors import DataError
from longtail.lengths.data_values import LengthData
from longtail.lengths.evaluate import Evaluation, verdict

SEEN_MUCH = 0.02
"""A share of known prompts that is worth a word."""
JSON, PNG, HTML = "report.json", "report.png", "report.html"


@dataclass(frozen=True)
class Latency:
    """Scoring times of a warm ranker, in ms: single prompts (median and 99th percentile), and per prompt of a batch."""

    single_p50_ms: float
    single_p99_ms: float
    batch: int
    batch_per_prompt_ms: float


@dataclass(frozen=True)
class Report:
    """What was evaluated and what came out.

    ``quantiles`` [n] are the predicted ones, ``ranker`` describes the ranker in plain JSON, ``seen`` is the share of
    the prompts that it was trained on (None: not known), ``command`` says how the report was made.
    """

    data: LengthData
    quantiles: np.ndarray
    overall: Evaluation
    by_source: dict[str, Evaluation]
    ranker: dict[str, Any] = field(default_factory=dict)
    latency: Latency | None = None
    seen: float | None = None
    command: str = ""

    @property
    def verdict(self) -> str:
        """What the figures mean, and whether to believe them."""
        if not self.seen or self.seen < SEEN_MUCH:
            return verdict(self.overall)
        return (
            f"About {self.seen:.0%} of these prompts were in the ranker's training data, so these figures flatter it: "
            f"judge it by others. {verdict(self.overall)}"
        )

    def to_json(self) -> dict[str, Any]:
        data = self.data
        rows = np.bincount(data.sources, minlength=len(data.source_names)).tolist()
        return {
            "verdict": self.verdict,
            "seen_in_training": self.seen,
            "overall": self.overall.to_json(),
            "sources": {name: e.to_json() for name, e in self.by_source.items()},
            "latency": None if self.latency is None else vars(self.latency),
            "data": {
                "rows": len(data),
                "unit": data.unit,
                "sources": [
                    {"name": name, "unit": unit, "rows": n}
                    for name, unit, n in zip(data.source_names, data.units, rows, strict=True)
                ],
                "notes": list(data.notes),
            },
            "ranker": self.ranker,
            "command": self.command,
        }


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write the three files into ``folder``, replacing earlier ones. Raises :class:`DataError` if it cannot."""
    from longtail.lengths.report_plot import draw

    png = draw(report)
    record = plain(report.to_json())
    contents = {
        JSON: (json.dumps(record, indent=2, allow_nan=False) + "\n").encode(),
        PNG: png,
        HTML: render_html(report, png).encode("utf-8", "replace"),
    }
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            temporary = folder / f".{name}.{os.getpid()}"
            temporary.write_bytes(content)
            temporary.replace(folder / name)
            paths.append(folder / name)
    except OSError as error:
        raise DataError(f"{folder}: the report cannot be written: {error.strerror or error}") from error
    return paths


def plain(value: Any) -> Any:
    """The value as strict JSON: NumPy's numbers become Python's, and what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


# -- figures in words -----------------------------------------------------------------------------------------------


def tau_text(e: Evaluation) -> str:
    """``0.412 (0.371 to 0.448)``, or why there is none."""
    if e.tau is None:
        return e.reasons["tau"]
    interval = f" ({e.tau_low:.3f} to {e.tau_high:.3f})" if e.tau_low is not None else ""
    return f"{e.tau:.3f}{interval}"


def pairs_text(e: Evaluation) -> str:
    """``74.1 % of 161,893 pairs``, or why there is none."""
    if e.pair_accuracy is None:
        return e.reasons["pair_accuracy"]
    return f"{100 * e.pair_accuracy:.1f} % of {e.pairs:,} pairs" + (" (a sample)" if e.pairs_sampled else "")


def figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """``(name, value, what it means)`` of every figure over all sources."""
    e = report.overall
    yield "Kendall tau-b", tau_text(e), "1 perfect, 0 chance" + ("; 95 % interval" if e.tau_low is not None else "")
    unknown = f"; {e.pairs_unknown:,} of unknown order left out" if e.pairs_unknown else ""
    yield "pair accuracy", pairs_text(e), f"lengths {100 * e.delta:g} % apart or more{unknown}"
    if e.censored:
        yield "cut off at a limit", f"{e.censored:,} ({e.censored / e.n:.0%})", "their true length is not known"
    if e.calibration is not None:
        uniform, mean = e.calibration.uniform_error, e.calibration.mean_error
        yield "quantiles, spread", f"{uniform:.3f}", "0 is uniform over these prompts"
        yield "quantiles, error", f"{mean:.3f}", "predicted against true, 0 is perfect"
    if report.latency is not None:
        t = report.latency
        yield "scoring one prompt", f"{t.single_p50_ms:.3f} ms, p99 {t.single_p99_ms:.3f} ms", "warm"
        yield f"scoring {t.batch} at once", f"{t.batch_per_prompt_ms:.3f} ms", "per prompt, warm"


# -- the page -------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; max-width: 70rem; margin: 2rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.what { color: #5b6875; margin: 0 0 1.2rem; } .verdict { border-left: 4px solid #2a6f97; background: #f1f6fa;
       padding: .7rem 1rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .8rem .3rem 0;
       border-bottom: 1px solid #e3e8ed; vertical-align: top; } th { color: #5b6875; font-weight: 600; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; } td.m { color: #5b6875; }
img { max-width: 100%; height: auto; margin: .5rem 0; } pre { background: #f6f8fa; padding: .8rem; overflow-x: auto;
       font-size: .85rem; } li { margin: .2rem 0; overflow-wrap: anywhere; }
"""


def render_html(report: Report, png: bytes) -> str:
    """The whole page as one text; everything that comes from data is escaped."""
    names = ", ".join(report.data.source_names)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Ranking report: {escape(names)}</title><style>{STYLE}</style></head><body>",
        "<h1>How well are response lengths ranked?</h1>",
        f"<p class='what'>{len(report.data):,} prompts of {escape(names)}; lengths in {escape(report.data.unit)}; "
        f"{escape(_ranker_line(report.ranker))}</p>",
        f"<p class='verdict'>{escape(report.verdict)} Order matters only where requests wait: without a queue "
        "no ranking changes anything.</p>",
        _table(("figure", "value", ""), list(figures(report)), classes=("", "n", "m")),
    ]
    if len(report.by_source) > 1:
        rows = [(name, f"{e.n:,}", tau_text(e), pairs_text(e)) for name, e in report.by_source.items()]
        parts += ["<h2>Source by source</h2>", _table(("source", "prompts", "Kendall tau-b", "pair accuracy"), rows)]
    image = base64.b64encode(png).decode()
    alt = "Predicted quantile against true length, confusion of length deciles, calibration of the quantiles"
    parts += ["<h2>Plots</h2>", f"<img alt='{alt}' src='data:image/png;base64,{image}'>", _deciles_note()]
    if report.data.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in report.data.notes)
        parts += ["<h2>Notes on the data</h2>", f"<ul>{notes}</ul>"]
    if report.ranker:
        text = json.dumps(plain(report.ranker), indent=2, ensure_ascii=False)
        parts += ["<h2>The ranker</h2>", f"<pre>{escape(text)}</pre>"]
    if report.command:
        parts += ["<h2>Made by</h2>", f"<pre>{escape(report.command)}</pre>"]
    return "\n".join([*parts, "</body></html>\n"])


def _ranker_line(ranker: dict[str, Any]) -> str:
    return f"ranker {ranker.get('name', 'unnamed')}"


def _deciles_note() -> str:
    return (
        "<p class='what'>Left: each point is a prompt. Middle: of the prompts in a predicted decile (row), the share "
        "in each true decile; a perfect ranker has the diagonal only. Right: the mean true quantile of prompts by "
        "predicted quantile; a ranker that knows less lies flatter, towards one half.</p>"
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], classes: tuple[str, ...] = ()) -> str:
    styles = [f" class='{name}'" if name else "" for name in classes] or [""] * len(head)
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{style}>{escape(cell)}</td>" for style, cell in zip(styles, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
