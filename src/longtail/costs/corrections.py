"""A cost table corrected by what a run measures: machines are shared, warm up, and differ from the day of the
profile."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from longtail.core.events import Span
from longtail.core.types import SubStage
from longtail.costs.ratio import Ratio, shrunk
from longtail.costs.table import CostTable

HALF_LIFE_QUANTA = 2000
"""Quanta after which a measurement weighs half, as in :class:`~longtail.costs.decode.DecodeFit`."""
TRUST_QUANTA = 50
"""So many quanta of evidence are believed to one half."""
TRAIN_QUANTA = 2
"""A slice of a micro-batch (on CUDA a whole one) is as much evidence as so many quanta of sampling: it is longer."""


@dataclass
class Corrections:
    """How much longer prefill, decode and training of one pipeline take than its table says, for each degree (training
    has degree 1).

    What little is known of one degree leans on what is known of narrower ones, and that on the table: a machine that is
    slow today is slow at every degree, and a degree that has not been tried yet must not look better for it. It is not
    so the other way round: members of a group wait for each other at every gather, so whatever else goes on on the
    machine slows groups more. Where only wider degrees are known, training says how slow one worker is.
    """

    _ratios: dict[tuple[str, int], Ratio] = field(default_factory=dict)

    def observe(self, span: Span, table: CostTable) -> None:
        """Take in a span; ``table`` is the one that was measured, uncorrected. Those of which it says nothing are
        ignored. What other pipelines on the same worker did to it must not be in it (``interference_log.py``)."""
        expected_s = table_s(span, table)
        if expected_s is None or span.busy_s <= 0:
            return
        count = span.quanta * (TRAIN_QUANTA if span.substage == SubStage.TRAIN else 1)
        ratio = self._ratios.setdefault((str(span.substage), span.tp), Ratio())
        ratio.observe(math.log(span.busy_s / expected_s), count, HALF_LIFE_QUANTA)

    def factor(self, degree: int, substage: str) -> float:
        """By what predictions of ``substage`` at ``degree`` are to be multiplied."""
        alike = {known: ratio for (stage, known), ratio in self._ratios.items() if stage == substage}
        telling = [ratio for known, ratio in alike.items() if known <= degree]
        training = self._ratios.get((str(SubStage.TRAIN), 1))
        if not telling:
            telling = [training] if training is not None else [*alike.values()]
        shared = shrunk(telling, towards=0.0, trust=TRUST_QUANTA)
        own = self._ratios.get((str(substage), degree))
        return math.exp(shrunk([own], towards=shared, trust=TRUST_QUANTA) if own is not None else shared)

    def predicted_s(self, span: Span, table: CostTable) -> float | None:
        """Busy seconds that the span should have had, as costs seem to be now; None: nothing is known of such work."""
        expected_s = table_s(span, table)
        return None if expected_s is None else expected_s * self.factor(span.tp, span.substage)

    def apply(self, table: CostTable) -> CostTable:
        """``table`` as it seems to be now."""
        train_token_s = table.train_token_s
        return replace(
            table,
            decode={d: grid.scaled(self.factor(d, SubStage.DECODE)) for d, grid in table.decode.items()},
            prefill={d: costs.scaled(self.factor(d, SubStage.PREFILL)) for d, costs in table.prefill.items()},
            train_token_s=None if train_token_s is None else train_token_s * self.factor(1, SubStage.TRAIN),
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {f"{stage}/{degree}": dict(vars(ratio)) for (stage, degree), ratio in self._ratios.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ratios = {}
        for key, ratio in state.items():
            stage, degree = key.split("/")
            self._ratios[stage, int(degree)] = Ratio(**ratio)


def table_s(span: Span, table: CostTable) -> float | None:
    """Busy seconds of the span by the ``table``; None: it says nothing of such work."""
    if span.quanta < 1 or span.tp not in table.degrees:
        return None
    seconds = 0.0
    if span.substage == SubStage.DECODE and span.batch > 0:
        seconds = span.quanta * table.decode_s(span.tp, span.batch, span.context)
    elif span.substage == SubStage.PREFILL and span.tokens > 0:
        chunk = span.tokens / span.quanta
        seconds = span.quanta * float(table.prefill_s(span.tp, np.array(chunk)))
    elif span.substage == SubStage.TRAIN and span.tp == 1:
        seconds = span.tokens * (table.train_token_s or 0.0)
    return seconds if seconds > 0 else None
