"""A cost table corrected by what a run measures: machines are shared, warm up, and differ from the day of the
profile."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from longtail.core.events import Span
from longtail.core.types import SubStage
from longtail.costs.table import CostTable

HALF_LIFE_QUANTA = 2000
"""Quanta after which a measurement weighs half, as in :class:`~longtail.costs.decode.DecodeFit`."""
TRUST_QUANTA = 50
"""So many quanta of evidence are believed to one half."""
MOST_SURPRISE = math.log(2.0)
"""No span says more than that work takes twice, or half, as long as was known so far: one long pause (a page fault, a
garbage collection, a neighbour that starts) moves the estimate little, a machine that became slower is learnt all the
same, from many spans."""


@dataclass
class _Ratio:
    """The mean logarithm of measured / predicted, and the quanta that it rests on."""

    mean: float = 0.0
    weight: float = 0.0

    def observe(self, log_ratio: float, quanta: int) -> None:
        fade = 0.5 ** (quanta / HALF_LIFE_QUANTA)
        # A long span stands for all quanta in it, of which the early ones have faded by its end.
        weight = min(quanta, (1.0 - fade) * HALF_LIFE_QUANTA / math.log(2.0))
        self.weight = self.weight * fade + weight
        surprise = min(max(log_ratio - self.mean, -MOST_SURPRISE), MOST_SURPRISE)
        self.mean += surprise * weight / self.weight


@dataclass
class Corrections:
    """How much longer prefill and decode of one pipeline take than its table says, for each degree.

    What little is known of one degree leans on what is known of the others, and that on the table: a machine that is
    slow today is slow at every degree, and a degree that has not been tried yet must not look better for it.
    """

    _ratios: dict[tuple[str, int], _Ratio] = field(default_factory=dict)

    def observe(self, span: Span, table: CostTable) -> None:
        """Take in a ``decode`` or ``prefill`` span; ``table`` is the one that was measured, uncorrected. Spans of other
        kinds, or of a degree that the table does not know, are ignored."""
        if span.quanta < 1 or span.busy_s <= 0 or span.tp not in table.degrees:
            return
        if span.substage == SubStage.DECODE and span.batch > 0:
            predicted_s = span.quanta * table.decode_s(span.tp, span.batch, span.context)
        elif span.substage == SubStage.PREFILL and span.tokens > 0:
            chunk = span.tokens / span.quanta
            predicted_s = span.quanta * float(table.prefill_s(span.tp, np.array(chunk)))
        else:
            return
        if predicted_s > 0:
            ratio = self._ratios.setdefault((str(span.substage), span.tp), _Ratio())
            ratio.observe(math.log(span.busy_s / predicted_s), span.quanta)

    def factor(self, degree: int, substage: SubStage) -> float:
        """By what predictions of ``substage`` at ``degree`` are to be multiplied."""
        shared = _shrunk((r for (stage, _), r in self._ratios.items() if stage == substage), towards=0.0)
        own = self._ratios.get((str(substage), degree))
        return math.exp(_shrunk([own], towards=shared) if own is not None else shared)

    def apply(self, table: CostTable) -> CostTable:
        """``table`` as it seems to be now."""
        return replace(
            table,
            decode={d: grid.scaled(self.factor(d, SubStage.DECODE)) for d, grid in table.decode.items()},
            prefill={d: costs.scaled(self.factor(d, SubStage.PREFILL)) for d, costs in table.prefill.items()},
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {f"{stage}/{degree}": dict(vars(ratio)) for (stage, degree), ratio in self._ratios.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ratios = {}
        for key, ratio in state.items():
            stage, degree = key.split("/")
            self._ratios[stage, int(degree)] = _Ratio(**ratio)


def _shrunk(ratios: Iterable[_Ratio], towards: float) -> float:
    known = list(ratios)
    weight = sum(r.weight for r in known)
    return (sum(r.weight * r.mean for r in known) + TRUST_QUANTA * towards) / (weight + TRUST_QUANTA)
