"""In which order waiting requests are served: near-shortest-first, with a bound on how far one can be overtaken.

A request that arrives at ``a`` with predicted quantile ``u`` gets the virtual deadline ``a + H * u``, and the earliest
deadline goes first. ``H``, the head start, is the one knob: 0 is first come first served, and the larger it is, the
closer to shortest first. Whatever arrives more than ``H * (u_self - u_other)`` seconds later stays behind; so nothing
is overtaken by what arrives more than ``H`` after it, without any ageing thread, and in servers that know nothing but
a fixed integer priority. Near-shortest-first by a predicted rank is PARS (arXiv 2510.03243).
"""

from __future__ import annotations

HEAD_START_S = 20.0
"""H by default: some times as long as an answer usually takes. docs/serving.md has what other values do."""
MOST_HEAD_START_S = 1e6
"""Above it, priorities would come close to what an int64 holds."""
UNKNOWN_QUANTILE = 0.5
"""For requests that could not be scored: among each other they keep their order of arrival."""
PRIORITY_EPOCH_S = 1_577_836_800.0
"""2020-01-01, seconds since 1970: priorities of several gateways, and of one after a restart, are comparable."""


def virtual_deadline(arrival_s: float, quantile: float | None, *, head_start_s: float) -> float:
    """Seconds on the clock of ``arrival_s``; earlier goes first."""
    return arrival_s + head_start_s * (UNKNOWN_QUANTILE if quantile is None else quantile)


def as_priority(deadline_s: float) -> int:
    """A deadline in seconds since 1970 as vLLM's priority (an int64, lower goes first): milliseconds since 2020."""
    return round(1000 * (deadline_s - PRIORITY_EPOCH_S))


def of_priority(priority: int) -> float:
    """The deadline in seconds since 1970 that :func:`as_priority` made a priority of (or that it stands for)."""
    return priority / 1000 + PRIORITY_EPOCH_S
