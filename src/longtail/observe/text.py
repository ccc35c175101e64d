"""Small formatters that the terminal, the plain lines and the summary share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")


def one_line(text: str) -> str:
    """``text`` on one line, without escape sequences or other control characters (messages may quote user code)."""
    return _clean(text).strip(" ")


def lines(text: str) -> list[str]:
    """``text`` line by line, each without control characters; for what is worth several lines, as a traceback is."""
    return [_clean(line).rstrip() for line in text.splitlines() if line.strip()]


def about(name: str | None, message: str) -> str:
    """``message`` on one line, without its own mention of ``name`` at the start, for where the name stands already."""
    return one_line(message).removeprefix(f"{name}: ")


def _clean(text: str) -> str:
    return _CONTROLS.sub(" ", _ESCAPES.sub("", text))


def number(value: float | None) -> str:
    """``0.41``, ``12.5``, ``1,812``, ``1.2e-06``, ``NaN``; ``-`` for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    size = abs(value)
    if size == 0 or 0.01 <= size < 9.995:
        return f"{value:.2f}"
    if 9.995 <= size < 99.95:
        return f"{value:.1f}"
    if 99.95 <= size < 1e6:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def reward(value: float | None) -> str:
    """As :func:`number`, but in columns: two decimals also where the value is tiny."""
    if value is not None and abs(value) < 0.01:
        return f"{round(value, 2) + 0.0:.2f}"
    return number(value)


def duration(seconds: float | None) -> str:
    """``0.35 s``, ``12.3 s``, ``4 min 05 s``, ``2 h 13 min``; ``-`` for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def brief(seconds: float) -> str:
    """As :func:`duration`, for what may take milliseconds: ``3.1 ms``, ``0.02 s``."""
    return f"{1000 * seconds:.1f} ms" if 0 < abs(seconds) < 0.00995 else duration(seconds)


def signed(seconds: float) -> str:
    """A gain or a loss: ``+1.8 s``, ``-3.1 ms``."""
    return ("-" if seconds < 0 else "+") + brief(abs(seconds))


def size(count: float) -> str:
    """Bytes: ``512 B``, ``1.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.95 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` bars: means of equal runs of ``values``, scaled to their range; a gap where none is finite."""
    if width <= 0 or not values:
        return ""
    cells = min(width, len(values))
    means: list[float | None] = []
    for i in range(cells):
        run = values[i * len(values) // cells : (i + 1) * len(values) // cells]
        finite = [v for v in run[:: len(run) // 64 + 1] if math.isfinite(v)]  # a sample will do for a bar
        means.append(sum(v / len(finite) for v in finite) if finite else None)
    known = [m for m in means if m is not None]
    if not known:
        return " " * cells
    low, high = min(known), max(known)
    span = high / 2 - low / 2  # halves, for the sake of the largest numbers
    top = len(BARS) - 1
    return "".join(
        " " if m is None else BARS[round(top * min(1.0, (m / 2 - low / 2) / span)) if span > 0 else 0] for m in means
    )


def short_path(path: str) -> str:
    """Relative to the working directory where that is shorter: ``runs/demo/a/step-000060``."""
    inside = os.path.relpath(path) if os.path.isabs(path) else path
    return path if inside.startswith("..") else inside
