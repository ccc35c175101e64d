"""What the planner says of how pipelines share the workers: its last word in a line, and all of them in sums."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from longtail.core.events import Planned
from longtail.observe.text import brief, one_line, percent

IN_TURNS = "hold"
GRAIN = math.log(1.02)
"""Planning times are counted in classes of 2 %, so that a long run keeps few numbers."""
MOST_RATES = 6


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """``told``: events; ``median_s`` (within 1 %) and ``most_s`` are of the time that planning took.

    Of the time in which steps were under way, ``in_turns`` is the share that pipelines took turns, where there were
    several; ``predicted`` is the mean of the predicted throughput over that of turns. None where nothing is known, and
    ``predicted`` also where that is so of more than half the time.
    """

    told: int
    in_turns: float | None
    predicted: float | None
    median_s: float
    most_s: float


class PlanTotals:
    """Fold plans with :meth:`planned`, and the time between them with :meth:`passed`."""

    def __init__(self) -> None:
        self.latest: Planned | None = None
        """The plan that holds; None before the first one of a start of the run."""
        self._told = 0
        self._most_s = 0.0
        self._classes: Counter[int] = Counter()
        self._turns_s = self._several_s = 0.0
        self._predicted_s = self._foretold_s = self._passed_s = 0.0

    def planned(self, event: Planned) -> None:
        self.latest = event
        self._told += 1
        self._most_s = max(self._most_s, event.duration_s)
        self._classes[round(math.log(max(event.duration_s, 1e-6)) / GRAIN)] += 1

    def passed(self, seconds: float, *, pipelines: int) -> None:
        """Time has passed in which so many pipelines ran, and some of them were at a step."""
        self._passed_s += seconds
        if pipelines < 2:
            self._predicted_s += seconds  # alone, a pipeline has the throughput of turns
            self._foretold_s += seconds
        elif self.latest is not None:
            self._several_s += seconds
            self._turns_s += seconds * (self.latest.mode == IN_TURNS)
            if (rate := throughput(self.latest)) is not None:
                self._predicted_s += seconds * rate
                self._foretold_s += seconds

    def forget(self) -> None:
        """The run has ended or was started anew: no plan holds."""
        self.latest = None

    def summary(self) -> PlanSummary | None:
        """None if nothing was ever planned."""
        if not self._told:
            return None
        known = 0 < self._passed_s <= 2 * self._foretold_s
        return PlanSummary(
            told=self._told,
            in_turns=self._turns_s / self._several_s if self._several_s else None,
            predicted=self._predicted_s / self._foretold_s if known else None,
            median_s=min(self._most_s, math.exp(GRAIN * self._median_class())),
            most_s=self._most_s,
        )

    def _median_class(self) -> int:
        seen = 0
        for number in sorted(self._classes):
            seen += self._classes[number]
            if 2 * seen >= self._told:
                return number
        return 0


def throughput(plan: Planned) -> float | None:
    """Predicted, over that of taking turns; None where nothing was predicted."""
    rates = [rate for rate in plan.rates.values() if math.isfinite(rate)]
    return sum(rates) if rates and len(rates) == len(plan.rates) else None


def describe(plan: Planned) -> str:
    """``side by side 1.31x of turns (sums 0.71, collatz 0.60): why``, or ``in turns: why``; a reason that says the
    first words itself stands alone."""
    words = "in turns" if plan.mode == IN_TURNS else "side by side"
    if plan.reason.startswith(words):
        return one_line(plan.reason)
    if plan.mode == IN_TURNS:
        return one_line(f"{words}: {plan.reason or 'sharing would lose'}")
    if (rate := throughput(plan)) is not None:
        each = ", ".join(f"{name} {r:.2f}" for name, r in list(plan.rates.items())[:MOST_RATES])
        more = ", ..." if len(plan.rates) > MOST_RATES else ""
        words += f" {rate:.2f}x of turns ({each}{more})"
    return one_line(f"{words}: {plan.reason}") if plan.reason else words


def account(plans: PlanSummary) -> str:
    """``in turns for 12 % of the time, planning took 3.1 ms (at most 0.04 s)``."""
    parts = [f"in turns for {percent(plans.in_turns)} of the time"] if plans.in_turns is not None else []
    return ", ".join([*parts, f"planning took {brief(plans.median_s)} (at most {brief(plans.most_s)})"])
