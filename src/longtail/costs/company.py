"""Which spans of a worker had it to themselves, and beside what the others ran.

A worker does one quantum at a time, so what a span leaves of the time between its first and its last quantum belongs to
others, or to nobody. Spans of others may be told later. So one that leaves some is judged when those others have told
of all its time, or the worker of so much time after it that it will tell no more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from longtail.core.events import Span
from longtail.costs.interference import work_class

ALL = 0.98
"""A share of the time that leaves no room for others."""
MOST = 0.75
"""A larger share says little of interference, and is not quite undisturbed either."""
EXPLAINED = 0.5
"""What spans of others have to explain, at least, of the time that a span leaves."""
IDLE = 0.3
"""A larger part of the time for which nobody has an explanation makes a span unclear: something is yet to be told."""
FEW_QUANTA = 3
"""With so few, what was done just before the first of them counts as well ..."""
LEAD = 4.0
"""... for up to so many times what the span itself lasts."""
HOLD_S = 10.0
"""A worker that has told of so much time after a span has nothing more to say about it."""
LATE_S = 5.0
"""A span is told so long after its end, at most."""
MOST_HELD = 64
RECENT = 256


class Company(NamedTuple):
    """The pipeline of a span had this ``share`` of the worker's time; the ``others``' seconds are by (pipeline, class),
    None for classes that are not known."""

    share: float
    others: Mapping[tuple[str, str | None], float]


ALONE = Company(1.0, {})


class WorkerSpans:
    """Spans of one worker, in the order in which it tells them."""

    def __init__(self) -> None:
        self._recent: deque[Span] = deque(maxlen=RECENT)
        self._held: deque[tuple[Span, float]] = deque()
        self._told: dict[str, float] = {}
        """Up to when each pipeline has told of its time here."""
        self._shared_until = -math.inf
        """Up to when pipelines that are gone may have had time here of which they will not tell."""

    def add(self, span: Span) -> list[tuple[Span, Company]]:
        """The spans that can be judged now, this one or earlier ones; what is unclear is left out."""
        since = span.start
        before = self._told.get(span.pipeline)
        if before is not None and span.quanta <= FEW_QUANTA:
            since = min(since, max(before, span.start - LEAD * (span.end - span.start)))
        self._recent.append(span)
        self._told[span.pipeline] = max(before or 0.0, span.end)
        judged = list[tuple[Span, Company]]()
        lone = len(self._told) == 1 and since >= self._shared_until
        if span.busy_s >= (1.0 - IDLE if lone else ALL) * (span.end - since):
            judged.append((span, ALONE))
        else:
            self._held.append((span, since))
        for held in self._ready():
            company = self._judge(*held)
            if company is not None:
                judged.append((held[0], company))
        return judged

    def keep(self, pipelines: Collection[str]) -> None:
        """All but these are over; what their last work leaves unclear is left out."""
        gone = self._told.keys() - pipelines
        if not gone:
            return
        told = min(self._told[name] for name in gone)
        self._shared_until = max(self._shared_until, *self._told.values())
        self._held = deque(held for held in self._held if held[0].pipeline in pipelines and held[0].end <= told)
        for name in gone:
            del self._told[name]

    def _ready(self) -> list[tuple[Span, float]]:
        if not self._held:
            return []
        latest = max(self._told.values())
        ready, waiting = list[tuple[Span, float]](), deque[tuple[Span, float]]()
        for number, held in enumerate(self._held):
            span, _ = held
            told = min((end for pipeline, end in self._told.items() if pipeline != span.pipeline), default=-math.inf)
            surplus = len(self._held) - number > MOST_HELD
            (ready if told >= span.end or latest >= span.end + HOLD_S or surplus else waiting).append(held)
        self._held = waiting
        return ready

    def _judge(self, span: Span, since: float) -> Company | None:
        if len(self._told) == 1 and since >= self._shared_until:
            return ALONE
        total_s, mine_s = span.end - since, span.busy_s
        others: dict[tuple[str, str | None], float] = {}
        for other in reversed(self._recent):
            if other.end < since - LATE_S:
                break
            both_s = min(other.end, span.end) - max(other.start, since)
            if both_s <= 0 or other is span:
                continue
            busy_s = other.busy_s * both_s / (other.end - other.start)
            if other.pipeline == span.pipeline:
                mine_s += busy_s
            else:
                key = other.pipeline, work_class(other.substage, other.batch)
                others[key] = others.get(key, 0.0) + busy_s
        others_s = sum(others.values())
        left_s = total_s - mine_s
        if others_s <= (1.0 - ALL) * total_s:
            return ALONE if left_s <= IDLE * total_s else None
        share = mine_s / (mine_s + others_s)
        if others_s < EXPLAINED * left_s or share > MOST:
            return None
        return Company(share, others)
