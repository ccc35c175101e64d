"""Whose quantum is next on a worker: pipelines that have work share its time by weight, whatever their quanta take.

Each pipeline has a virtual time, the seconds that it was served over its weight; the one that is furthest behind is
next. This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): of two pipelines that have work all the
while, seconds over weight differ by at most one quantum of each, over any stretch of time. A change of weight scales
the lead that a pipeline has, as in stride scheduling (Waldspurger and Weihl, 1995), so it gives nobody a burst.
"""

from __future__ import annotations

from collections.abc import Iterable


class FairShare:
    """Pipelines by name. Weights outlive the pipelines that have them; who was never given one has 1.

    ``_served`` is the virtual time up to which each has been served, and ``_now`` that of the pipeline with work that
    is furthest behind. It never goes back, and nobody claims what lies before it: who has slept resumes level.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._now = 0.0

    def weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)

    def weigh(self, weights: Iterable[tuple[str, float]]) -> None:
        """From now on these have these weights (above 0); all others keep theirs."""
        for name, weight in weights:
            lead = self._start(name) - self._now
            self._served[name] = self._now + lead * self.weight(name) / weight
            self._weights[name] = weight

    def next(self, names: Iterable[str]) -> str | None:
        """Who of ``names``, all of which have work, is next; ties go by name."""
        return min(names, key=lambda name: (self._start(name), name), default=None)

    def used(self, name: str, seconds: float, waiting: Iterable[str]) -> None:
        """``name`` has had ``seconds`` while ``waiting`` had work too, and keep their claim to be served."""
        self._served[name] = self._start(name) + seconds / self.weight(name)
        self._now = min(self._start(other) for other in (name, *waiting))

    def forget(self, name: str) -> None:
        """``name`` is gone; its weight stays for the next of that name."""
        self._served.pop(name, None)

    def _start(self, name: str) -> float:
        """When its next quantum starts, in virtual time."""
        return max(self._now, self._served.get(name, self._now))
