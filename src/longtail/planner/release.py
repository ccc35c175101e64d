"""Is a wide group still worth its workers, when others wait for them?

Two things are weighed in seconds of waiting, added up over all pipelines. To keep the group, everyone waits until its
tail has ended: its own pipeline, and each of those that wait for the workers. To let go, its pipeline waits for the
switch and for the tail on one worker; the others get all but that one worker after the switch, and the last one when
the tail has ended, so that each of them waits that long for one part in ``degree`` of what it waits for:

    keep     (1 + waiting) x wide tail
    let go   switch + narrow tail + waiting x (switch + narrow tail / degree)

With nobody waiting the shorter tail wins; the more wait, the more the wide group must gain in tokens per worker-second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.rollout import NOW, Block, Costs, Rollout
from longtail.planner.tree import Group
from longtail.planner.widen import outcomes


@dataclass(frozen=True)
class Release:
    """``keep`` the group or let go; predicted seconds of its tail as it is (``wide_s``), and on one worker
    (``narrow_s``) after the switch to that (``switch_s``)."""

    keep: bool
    wide_s: float
    narrow_s: float
    switch_s: float
    reason: str


def worth_keeping(rollout: Rollout, group: Group, table: CostTable, *, waiting: float) -> Release:
    """Whether ``group``, one of the rollout's, should be kept while ``waiting`` pipelines (or parts of one) wait for
    its workers."""
    costs = Costs(table, len(rollout.of), rollout.slots)
    block = Block.whole(rollout, costs, outcomes(rollout.remaining.shape)).within(group)
    times = block.times(costs, (group[:1],), np.zeros(len(block), np.int64), NOW)
    wide_s, switch_s = float(times.stay_s.mean()), float(times.switch_s.mean())
    narrow_s = float(times.end_s.mean()) - switch_s
    keep_s = (1.0 + waiting) * wide_s
    release_s = switch_s + narrow_s + waiting * (switch_s + narrow_s / len(group))
    reason = (
        f"TP{len(group)} ends in {wide_s:.1f} s, one worker would in {switch_s + narrow_s:.1f} s: with {waiting:g} "
        f"waiting that adds up to {keep_s:.1f} s of waiting against {release_s:.1f} s"
    )
    return Release(keep_s <= release_s, wide_s, narrow_s, switch_s, reason)
