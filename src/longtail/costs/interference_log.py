"""Interference as a run learns it: what spans took beside other pipelines, over what they take alone.

What a pipeline takes alone, and what others add to it, cannot both be learnt from one span. So a pipeline's own costs
are corrected by spans that had a worker to themselves, and by nothing else; all others say what company does to them,
as they are corrected by then. Pipelines that are never alone thus have all their error in their factors. What is
predicted for them together is right all the same, and as soon as one of them is alone, the two are told apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from longtail.core.events import Span
from longtail.costs.company import Company, WorkerSpans
from longtail.costs.interference import SHARES, UNKNOWN, Interference, Shared, Work, model_of, within_models, work_class
from longtail.costs.ratio import Ratio, shrunk
from longtail.costs.table import CostTable, TableKey

HALF_LIFE_SPANS = 200
TRUST_SPANS = 12
"""So many spans of evidence are believed to one half at a share of time, and then pulled to what other shares say."""
KNOWN = 0.7
"""Part of the others' time of which must be known what it was."""


class OwnCosts(Protocol):
    """What the log needs of a pipeline's own costs (``runtime/known_costs.py``)."""

    @property
    def table(self) -> CostTable | None:
        """As measured; None: not yet."""
        ...

    def observe(self, span: Span) -> None:
        """Correct the table by a span that had its worker to itself."""

    def predicted_s(self, span: Span) -> float | None:
        """Busy seconds that the span should have had on a worker of its own, corrected; None: not known."""
        ...

    def pairs(self, keys: Iterable[TableKey]) -> Interference:
        """What profiles say of pairs of models."""
        ...


class InterferenceLog:
    """``own`` gives the costs of a pipeline, None once it is gone."""

    def __init__(self, own: Callable[[str], OwnCosts | None]) -> None:
        self._own = own
        self._workers: dict[int, WorkerSpans] = {}
        self._tables: dict[str, CostTable] = {}
        self._prior = UNKNOWN
        """What profiles say of the models of which there are tables by now."""
        self._ratios: dict[tuple[Work, Work], tuple[Ratio, Ratio, Ratio]] = {}
        """Of what was measured over what was predicted with the prior, at each of ``SHARES``."""
        self._current: Interference | None = None

    def observe(self, span: Span) -> None:
        """Any span of any pipeline, of each worker in the order in which it tells them. Lets pipelines know of theirs
        that had a worker to themselves."""
        for judged, company in self._workers.setdefault(span.worker, WorkerSpans()).add(span):
            own = self._own(judged.pipeline)
            if own is None:
                continue
            if not company.others:
                own.observe(judged)
            elif judged.tp == 1:
                self._learn(judged, company, own)

    def keep(self, pipelines: Collection[str]) -> None:
        """All pipelines but these are over."""
        for spans in self._workers.values():
            spans.keep(pipelines)

    def current(self) -> Interference:
        """All that is known by now."""
        if self._current is None:
            self._current = self._prior.joined(
                Interference(same={pair: self._shared(*pair, ratios) for pair, ratios in self._ratios.items()})
            )
        return self._current

    def _learn(self, span: Span, company: Company, own: OwnCosts) -> None:
        work = self._work(span.pipeline, work_class(span.substage, span.batch))
        predicted_s = own.predicted_s(span)
        if work is None or not predicted_s or span.busy_s <= 0:
            return
        beside: dict[Work, float] = {}
        for (pipeline, kind), seconds in company.others.items():
            other = self._work(pipeline, kind)
            if other is not None:
                beside[other] = beside.get(other, 0.0) + seconds
        known_s = sum(beside.values())
        if known_s < KNOWN * sum(company.others.values()):
            return
        nearest = min(range(len(SHARES)), key=lambda i: abs(SHARES[i] - company.share))
        parts = [
            (self._ratios.setdefault((work, other), (Ratio(), Ratio(), Ratio()))[nearest], seconds / known_s)
            for other, seconds in beside.items()
        ]
        expected = math.log(self._prior.among(work, beside, share=company.share))
        expected += sum(part * ratio.mean for ratio, part in parts)
        surprise = math.log(span.busy_s / predicted_s) - expected
        for ratio, part in parts:
            ratio.observe(ratio.mean + surprise, part, HALF_LIFE_SPANS)
        self._current = None

    def _work(self, pipeline: str, kind: str | None) -> Work | None:
        """None where the kind of work, or the pipeline's model, is not known."""
        own = self._own(pipeline)
        if own is None or (table := own.table) is None or kind is None:
            return None
        model = model_of(table.key)
        if model not in self._tables:
            self._tables[model] = table
            tables = self._tables.values()
            self._prior = within_models(tables).joined(own.pairs(table.key for table in tables))
            self._current = None
        return model, kind

    def _shared(self, work: Work, beside: Work, ratios: tuple[Ratio, Ratio, Ratio]) -> Shared:
        """Nothing becomes faster by taking turns."""
        everywhere = shrunk(ratios, towards=0.0, trust=TRUST_SPANS)
        low, middle, high = (
            max(
                1.0,
                self._prior.factor(work, beside, on="same", share=share)
                * math.exp(shrunk([ratio], towards=everywhere, trust=TRUST_SPANS)),
            )
            for share, ratio in zip(SHARES, ratios, strict=True)
        )
        return low, middle, high
