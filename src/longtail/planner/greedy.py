"""Sharing without looking ahead: every rollout begins on all workers, time is shared by priority, and a tail moves to
one worker once few are left of it and others have work.

It is what :func:`~longtail.planner.lookahead.share` falls back to when its predictions cannot be trusted, or take too
long; and what it is compared with.
"""

from __future__ import annotations

import numpy as np

from longtail.planner.merge import Present
from longtail.planner.state import ClusterState, Mode, PipelineState, Relocation, Sharing, Stage
from longtail.planner.tail import Carry

FEW_EACH = 2
"""A tail is merged once at most so many sequences are left for each worker that has any."""
BUSY = (Stage.ROLLOUT, Stage.TRAIN, Stage.UPDATE)


def share(state: ClusterState, *, merge: bool = True, why: str = "greedy") -> Sharing:
    """``why`` comes first in the reason."""
    working = [p for p in state.pipelines if p.steps_left > 0]
    everyone = tuple(range(state.workers))
    relocations = []
    if merge:
        for p in working:
            others = any(q.stage in BUSY for q in working if q is not p)
            if others and (move := _merged(p, state.workers)) is not None:
                relocations.append(move)
    return Sharing(
        mode=Mode.SHARE,
        reason=f"{why}: every rollout on all {state.workers} workers, time shared by priority",
        begin={p.name: everyone for p in state.pipelines},
        relocations=tuple(relocations),
        weights={p.name: p.priority for p in state.pipelines},
    )


def _merged(pipeline: PipelineState, workers: int) -> Relocation | None:
    live, table = pipeline.live, pipeline.costs
    if pipeline.merges_left < 1 or len(live) == 0 or len(live) > pipeline.slots or (live.lanes == 0).any():
        return None
    present = Present.of(pipeline, workers)
    holders, of = np.unique(present.worker, return_inverse=True)
    if len(holders) < 2 or len(live) > FEW_EACH * len(holders):
        return None
    to = (int(holders[np.bincount(of, live.lanes).argmax()]),)
    rest = int(live.remaining.max())
    batches = np.bincount(of)
    before_s = sum(rest * table.decode_s(1, n, float(n * live.context.mean())) for n in batches.tolist())
    after_s = rest * table.decode_s(1, len(live), float(live.context.sum()))
    cost_s = present.carry_s(present.merged(to), Carry.of(table))
    if before_s - after_s <= cost_s * len(holders):
        return None
    return Relocation(
        pipeline=pipeline.name,
        kind="merge",
        to=to,
        reason=f"{len(live)} samples left on {len(holders)} workers, and others have work: to worker {to[0]}",
        gain_s=before_s - after_s - cost_s * (len(holders) - 1),
        cost_s=cost_s,
        rest_s=after_s + cost_s,
    )
