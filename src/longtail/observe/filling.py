"""Of the worker time that a pipeline leaves idle during its steps, how much others use.

Invariant: what was counted stays counted, also of steps that became void: workers were busy and time passed.
"""

from __future__ import annotations

import math
from collections import deque

from longtail.core.events import Span

REMEMBERED_S = 30.0
"""A span is told when it is over, maybe after the step that it fell into: steps are remembered for so long."""


class StepTime:
    """The time in which a pipeline was at any of its steps, and who used the workers meanwhile.

    ``own_s`` and ``others_s`` are busy seconds, summed over workers. The busy time of a span is taken to be spread
    evenly over it.
    """

    def __init__(self) -> None:
        self.own_s = self.others_s = 0.0
        self._over_s = 0.0
        self._workers = 0
        self._since: float | None = None
        self._recent: deque[tuple[float, float]] = deque()

    def begin(self, t: float, workers: int) -> None:
        """A step has begun; nothing new if another one of the pipeline is under way."""
        if self._since is None:
            self._since, self._workers = t, workers

    def end(self, t: float) -> None:
        """No step is under way any more."""
        if self._since is None:
            return
        t = max(t, self._since)
        self._over_s += self._workers * (t - self._since)
        self._recent.append((self._since, t))
        self._since = None
        while self._recent[0][1] < t - REMEMBERED_S:
            self._recent.popleft()

    def used(self, span: Span, *, own: bool) -> None:
        """Workers did this, for the pipeline itself or for another one."""
        busy_s = span.busy_s * self._part_within(span.start, span.end)
        if own:
            self.own_s += busy_s
        else:
            self.others_s += busy_s

    def worker_s(self, now: float) -> float:
        """Seconds of all workers that the steps lasted until ``now``."""
        open_s = 0.0 if self._since is None else max(0.0, now - self._since)
        return self._over_s + self._workers * open_s

    def filled(self, now: float) -> float | None:
        """What others used, as a share of all that the pipeline did not use itself, 0 to 1; None if that is nothing."""
        left_s = self.worker_s(now) - self.own_s
        return min(1.0, self.others_s / left_s) if left_s > 0 else None

    def _part_within(self, start: float, end: float) -> float:
        part = 0.0 if self._since is None else overlap(start, end, self._since, math.inf)
        for since, until in reversed(self._recent):
            if until < start:
                break
            part += overlap(start, end, since, until)
        return min(1.0, part)


def overlap(start: float, end: float, since: float, until: float) -> float:
    """The fraction of [start, end] that lies in [since, until]; a point counts fully when it lies inside."""
    if end <= start:
        return 1.0 if since <= start <= until else 0.0
    return max(0.0, min(end, until) - max(start, since)) / (end - start)
