"""Measured over predicted, learnt while a run goes on: bounded in what one measurement may say, and forgetful."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MOST_SURPRISE = math.log(2.0)
"""No span says more than that work takes twice, or half, as long as was known so far: one long pause (a page fault, a
garbage collection, a neighbour that starts) moves the estimate little, a machine that became slower is learnt all the
same, from many spans."""


@dataclass
class Ratio:
    """The mean logarithm of measured / predicted, and the number of measurements that it rests on."""

    mean: float = 0.0
    weight: float = 0.0

    def observe(self, log_ratio: float, count: float, half_life: float) -> None:
        """Take in one that stands for ``count`` measurements; after ``half_life`` more it weighs half."""
        fade = 0.5 ** (count / half_life)
        # A long span stands for all quanta in it, of which the early ones have faded by its end.
        weight = min(count, (1.0 - fade) * half_life / math.log(2.0))
        self.weight = self.weight * fade + weight
        surprise = min(max(log_ratio - self.mean, -MOST_SURPRISE), MOST_SURPRISE)
        self.mean += surprise * weight / self.weight


def shrunk(ratios: Iterable[Ratio], towards: float, trust: float) -> float:
    """Their mean together with ``trust`` measurements that say ``towards``."""
    known = list(ratios)
    weight = sum(r.weight for r in known)
    return (sum(r.weight * r.mean for r in known) + trust * towards) / (weight + trust)
