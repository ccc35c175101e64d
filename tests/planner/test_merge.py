"""Merging a tail, and spreading it: what it saves, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from longtail.costs.table import CostTable
from longtail.planner.cells import Cells, Draft
from longtail.planner.merge import Alternative, Present, What, alternatives
from longtail.planner.solo import Steps, solo
from longtail.planner.state import Live, PipelineState, Stage
from longtail.planner.tail import LATENCY, Carry, rollout
from planner.clusters import costs, live, long_tailed, pipeline, shape

WORKERS = 4


def tail_of(
    state_live: Live, *, table: CostTable | None = None, merges_left: int = 2, degree: int = 1, slots: int = 64
) -> PipelineState:
    return pipeline(
        "a",
        shape(long_tailed(32)),
        stage=Stage.ROLLOUT,
        rollout=state_live,
        workers=range(WORKERS),
        table=table,
        merges_left=merges_left,
        degree=degree,
        slots=slots,
    )


def found(state: PipelineState, *, crowd: Sequence[float] = (1.0,) * WORKERS, merges: bool = True) -> list[Alternative]:
    return alternatives(
        state,
        Present.of(state, WORKERS),
        Steps.of(state.costs, 64, WORKERS),
        Cells(WORKERS, WORKERS),
        crowd=np.array(crowd),
        wait_s=0.0,
        merges=merges,
        offset=0,
    )


def whats(state: PipelineState, **more: bool) -> set[What]:
    return {a.what for a in found(state, **more)}


def test_a_tail_on_fewer_workers_takes_fewer_worker_seconds() -> None:
    stay, *others = found(tail_of(live([0, 1, 2, 3], [100, 200, 300, 400])))
    merges = [a for a in others if a.what is What.MERGE]
    assert [len(a.to) for a in merges] == [2, 1]
    assert merges[1].work_s < merges[0].work_s < stay.work_s
    assert merges[1].end_s >= merges[0].end_s > stay.end_s
    assert all(a.cost_s > 0 for a in merges)


def test_nothing_merges_where_nothing_may() -> None:
    some = live([0, 1, 2, 3], [100, 200, 300, 400])
    assert What.MERGE not in whats(tail_of(some, merges_left=0))
    assert What.MERGE not in whats(tail_of(some), merges=False)
    assert What.MERGE not in whats(tail_of(live([2, 2], [100, 50])))


def test_long_prefixes_stay_where_they_are_for_a_short_rest() -> None:
    # As dear to send as to compute again, and much more than what a few steps on fewer workers save.
    dear = costs(move_byte_s=4e-6, prefill_s=4e-3)
    short_prefix = tail_of(live([0, 1, 2, 3], [60] * 4, context=50), table=dear)
    long_prefix = tail_of(live([0, 1, 2, 3], [60] * 4, context=20_000), table=dear)
    assert What.MERGE in whats(short_prefix)
    assert What.MERGE not in whats(long_prefix)
    # What is left is long enough to pay for them.
    assert What.MERGE in whats(tail_of(live([0, 1, 2, 3], [6000] * 4, context=20_000), table=dear))


def test_each_sequence_is_sent_or_computed_whichever_is_cheaper() -> None:
    state = tail_of(live([0, 1], [50, 50], context=1000))
    present = Present.of(state, WORKERS)
    to = present.merged((1,))
    assert to.tolist() == [1, 1]
    sent, anew = Carry(0.01, 0.02, 1e-4, 1.0), Carry(0.01, 0.02, 1.0, 1e-4)
    assert present.carry_s(to, sent) == pytest.approx(0.01 + 0.02 + 0.1)
    assert present.carry_s(to, anew) == pytest.approx(0.01 + 0.1)
    assert present.carry_s(present.worker, sent) == 0.01


def test_it_merges_to_whom_others_leave_alone_and_who_has_most() -> None:
    state = tail_of(live([0, 1, 2, 3], [100, 200, 300, 400]))
    idle = next(a for a in found(state, crowd=(1, 1, 0, 1)) if len(a.to) == 1)
    assert idle.to == (2,)
    uneven = Live(
        worker=np.array([0, 1, 2, 3]),
        context=np.array([10, 10, 10, 900]),
        lanes=np.array([10, 10, 10, 900]),
        remaining=np.array([100, 200, 300, 400]),
    )
    most = next(a for a in found(tail_of(uneven, table=costs(move_byte_s=1e-6))) if len(a.to) == 1)
    assert most.to == (3,)


def test_who_is_there_stays_when_others_join() -> None:
    present = Present.of(tail_of(live([0, 0, 1, 2, 3], [10, 20, 30, 40, 50])), WORKERS)
    to = present.merged((0, 3))
    assert to[[0, 1, 4]].tolist() == [0, 0, 3]
    assert set(to.tolist()) == {0, 3}


def test_a_rollout_on_few_workers_may_spread() -> None:
    state = tail_of(live([1] * 16, [400] * 16))
    spread = next(a for a in found(state) if a.what is What.SPREAD)
    stay = found(state)[0]
    assert spread.to == (0, 1, 2, 3)
    assert spread.end_s < stay.end_s
    assert spread.work_s > stay.work_s
    # Nothing to gain for one, or for a rest that is over before the move is.
    assert What.SPREAD not in whats(tail_of(live([1], [400])))
    assert What.SPREAD not in whats(tail_of(live([1] * 16, [2] * 16)))


def test_wide_groups_and_what_waits_are_seen_as_single_workers() -> None:
    wide = Present.of(tail_of(live([0, 0, 0, 2], [10] * 4), degree=2), WORKERS)
    assert wide.worker.tolist() == [0, 1, 0, 2]
    pending = Present.of(tail_of(live([0, 0, -1, -1], [500, 500, 10, 10], waiting=2)), WORKERS)
    assert (pending.worker[2:] != 0).all()
    assert (pending.admit_s[2:] > 0).all()
    assert (pending.admit_s[:2] < 0).all()


def test_a_planned_merge_saves_worker_seconds_and_keeps_its_latency() -> None:
    step, table = shape(long_tailed(64, seed=3)), costs()
    draft, steps, carry = Draft.of(step, table, Cells(8, 8)), Steps.of(table, 64, 1), Carry.of(table)
    whole, tail = rollout(draft.on(8), steps, 64, stands_for=1.0, carry=carry)
    assert tail is not None
    ones = np.ones(8)
    assert sum(part.work_s(ones) for part in tail) < 0.98 * whole.work_s(ones)
    assert sum(part.critical_s for part in tail) <= LATENCY * whole.critical_s
    assert solo(draft.on(8), steps, 64).seconds == pytest.approx(whole.solo_s)
    assert rollout(draft.on(1), steps, 64, stands_for=1.0, carry=carry)[1] is None


def test_a_planned_merge_is_what_merging_then_comes_to() -> None:
    """The second part is the solo time of those that are left, all on one worker, and of moving them."""
    table = costs(handshake_s=0.5)
    step = shape([300, 10, 280, 10, 260, 10, 240, 10], group=2, prompt=0)
    steps, carry = Steps.of(table, 8, 1), Carry(0.5, 0.0, 1e-3, 1.0)
    sequences = Draft.of(step, table, Cells(4, 4)).on(4)
    _, tail = rollout(sequences, steps, 8, stands_for=1.0, carry=carry)
    assert tail is not None
    first, second = tail
    on = int((second.solo_s > 0).sum())
    moment = float(first.solo_s.max())
    rest = solo(sequences, steps, 8, np.array([moment])).rest[0]
    alive = np.flatnonzero(rest > 0)[np.argsort(-rest[rest > 0])][::on]
    held = sequences.context[alive] + sequences.left[alive] - rest[alive]
    expected, read = 0.5 + float(held.sum()) * 1e-3, held.astype(float)
    for i in range(int(rest[alive].max())):
        there = rest[alive] > i
        expected += table.decode_s(1, int(there.sum()), float((read + i)[there].sum()))
    assert float(second.solo_s.max()) == pytest.approx(expected, rel=1e-6)


def test_where_moving_is_too_dear_no_merge_is_planned() -> None:
    step = shape(long_tailed(64, seed=3), prompt=30_000)
    table = costs(move_byte_s=1e-4, prefill_s=0.05)
    carry = Carry.of(table)
    assert (
        rollout(Draft.of(step, table, Cells(8, 8)).on(8), Steps.of(table, 64, 1), 64, stands_for=1.0, carry=carry)[1]
        is None
    )
