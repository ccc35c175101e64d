"""A change of where the samples of a rollout are drawn: what was decided, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from longtail.cluster.messages import Switched
from longtail.core.events import MoveEnded, MoveMade
from longtail.core.types import Layout, Lease
from longtail.costs.table import CostTable
from longtail.planner.state import Relocation
from longtail.planner.tree import Group
from longtail.runtime.samples import StepSamples


@dataclass
class Move:
    """From the present layout to one with ``groups``: why, under which lease, what it took, and what came of it.

    ``leaves`` are workers that give all they have away. ``whole``: the layout has no other groups then, and loads are
    even if ``rebalance``. ``gain_s``, ``cost_s`` and ``rest_s`` (the last with the move) are as predicted.
    """

    name: str
    groups: tuple[Group, ...]
    reason: str = ""
    leaves: Group = ()
    whole: bool = False
    rebalance: bool = False
    gain_s: float | None = None
    cost_s: float | None = None
    rest_s: float | None = None
    without_s: Callable[[CostTable], float] | None = None
    """How long the samples concerned would have taken without it, by a cost table, once their lengths are known."""
    samples: np.ndarray | None = None
    """Those concerned; None: all."""
    decided: float = 0.0
    asked: tuple[Group, ...] = ()
    """``groups`` as decided; a lease may come to have more workers, whose groups stay as they are."""
    before: Layout | None = None
    lease: Lease | None = None
    reports: list[Switched] = field(default_factory=list)

    @classmethod
    def of(cls, relocation: Relocation, holders: Group, *, now: float) -> Move:
        """The samples that the single workers ``holders`` have go to those of ``relocation``."""
        to = tuple(sorted(set(relocation.to)))
        return cls(
            relocation.kind,
            tuple((worker,) for worker in to),
            reason=relocation.reason,
            leaves=tuple(worker for worker in holders if worker not in to),
            whole=True,
            rebalance=relocation.kind == "spread",
            gain_s=relocation.gain_s,
            cost_s=relocation.cost_s,
            rest_s=relocation.rest_s,
            decided=now,
        )

    @property
    def members(self) -> Group:
        """The workers of its groups."""
        return tuple(sorted(worker for group in self.groups for worker in group))

    @property
    def workers(self) -> Group:
        """All that take part."""
        return tuple(sorted((*self.members, *self.leaves)))

    def after(self, layout: Layout) -> Layout:
        """What ``layout`` becomes by it."""
        return Layout(self.groups) if self.whole else layout.replaced(self.groups)

    def made(self, pipeline: str, step: int, layout: Layout) -> MoveMade:
        """The decision, in ``layout``."""
        return MoveMade(
            pipeline=pipeline,
            step=step,
            move=self.name,
            workers=list(self.members),
            reason=self.reason,
            predicted_gain_s=self.gain_s,
            predicted_cost_s=self.cost_s,
            layout=None if self.whole else str(self.after(layout)),
        )

    def ended(self, pipeline: str, step: int, samples: StepSamples, costs: CostTable | None) -> MoveEnded:
        """What it came to; ``samples`` have all ended."""
        reports, refused = self.reports, self.reports[0].refused if self.reports else None
        rest_s = gain_s = None
        if refused is None:
            ends = samples.ended if self.samples is None else samples.ended[self.samples]
            rest_s = float(ends.max()) - self.decided if len(ends) else 0.0
            if self.without_s is not None and costs is not None:
                gain_s = self.without_s(costs) - rest_s
        return MoveEnded(
            pipeline=pipeline,
            step=step,
            move=self.name,
            workers=list(self.members),
            cost_s=max((report.duration_s for report in reports), default=0.0),
            moved_bytes=sum(report.moved_bytes for report in reports),
            recomputed_tokens=max((report.recomputed_tokens for report in reports), default=0),
            predicted_cost_s=self.cost_s,
            predicted_rest_s=self.rest_s,
            rest_s=rest_s,
            gain_s=gain_s,
            refused=refused,
        )
