"""A rollout on some of the workers: it begins there, moves to others in mid-rollout, and no lease is left behind."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.core.events import MoveEnded, MoveMade, Note
from longtail.core.types import Layout
from longtail.planner.state import Relocation
from longtail.runtime.order import StepOrder
from runtime.widen_bench import Bench

FOUR = (50, 60, 90, 80)


def relocation(to: tuple[int, ...], kind: str = "merge") -> Relocation:
    return Relocation(pipeline="a", kind=kind, to=to, reason="so it is", gain_s=3.0, cost_s=0.5, rest_s=4.0)


def on_two(**options) -> Bench:
    """A rollout of four samples, two on each of two workers, all of which are heard of."""
    bench = Bench(**{"tp": 1, "company": True, "lengths": FOUR, **options})
    assert bench.begin()
    bench.now = 1.0
    bench.hear({0: [[8, 9]], 1: [[8, 7]]})
    return bench


def on_one(**options) -> Bench:
    """The same on the second worker."""
    bench = Bench(**{"tp": 1, "company": True, "lengths": FOUR, **options})
    assert bench.begin(on=(1,))
    bench.now = 1.0
    bench.hear({1: [[8, 9], [8, 7]]})
    return bench


def others_may_have(bench: Bench, *workers: int) -> bool:
    bench.book.ask("other", workers)
    granted = [lease.pipeline for lease in bench.book.grant()]
    bench.book.clear()
    return granted == ["other"]


# Where it begins


@pytest.mark.parametrize("tp", [1, "auto", "oracle", "threshold:4"])
def test_a_rollout_that_is_placed_begins_narrow_on_those_workers_alone(tp):
    bench = Bench(tp=tp, workers=4, lengths=FOUR)
    assert bench.begin(on=(3, 1))
    assert bench.widen.layout == Layout(((1,), (3,)))
    assert bench.widen.workers == (1, 3)
    (made,) = bench.of_kind(MoveMade)
    assert (made.move, made.workers, made.layout) == ("place", [1, 3], None)
    assert bench.book.grant() == []
    assert [len(bench.widen.group_costs()), bench.widen.degree] == [2, 1]


def test_a_rollout_on_some_of_the_workers_forms_no_groups():
    bench = Bench(workers=4, lengths=(5, 5, 90, 5))
    assert bench.begin(on=(0, 1))
    bench.end(0, 1, 3)
    bench.hear({0: [[-1, -1]], 1: [[8, -1]]})
    assert bench.book.grant() == []


def test_to_begin_on_all_workers_is_no_placement():
    bench = Bench()
    assert not bench.begin(on=(1, 0))
    assert bench.grant()
    assert [made.move for made in bench.of_kind(MoveMade)] == ["widen"]


def test_groups_of_a_fixed_degree_begin_on_all_workers_wherever_the_others_would():
    bench = Bench(tp=2, workers=4, lengths=FOUR, company=True)
    assert not bench.begin(on=(0,)), "it waits for its groups"
    bench.grant()
    assert bench.widen.layout == Layout(((0, 1), (2, 3)))
    assert [made.move for made in bench.of_kind(MoveMade)] == ["widen"]


@pytest.mark.parametrize("on", [(), (2,), (0, -1)])
def test_workers_that_there_are_not_are_an_error(on):
    with pytest.raises(ValueError, match="among 0 to 1"):
        Bench().begin(on=on)
    with pytest.raises(ValueError, match="among 0 to 1"):
        on_two().widen.relocate(relocation(on))


def test_the_next_rollout_begins_where_it_is_told_to():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.switched()
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    bench.widen.finish()
    assert bench.widen.workers == (0,), "until then it is known where the last one was"
    bench.begin()
    assert bench.widen.workers == (0, 1)
    assert bench.widen.merges_left == 2
    bench.begin(on=(1,))
    assert bench.widen.layout == Layout(((1,),))


# Fewer workers, and more


def test_a_merge_takes_a_lease_of_those_concerned_and_gives_it_back_at_once():
    bench = on_two()
    assert bench.widen.relocate(relocation((0,)))
    assert not bench.grant()
    assert [worker for worker, _ in bench.sent] == [0, 1]
    (_, command), _ = bench.sent
    assert (command.lease.workers, command.groups, command.rebalance) == ((0, 1), ((0,),), False)
    assert not bench.widen.at_rest
    assert bench.widen.layout.group_of(1) == (1,), "who has left may still report a sample"
    bench.switched()
    assert bench.widen.at_rest
    assert bench.widen.layout == Layout(((0,),))
    assert others_may_have(bench, 0, 1)
    (made,) = bench.of_kind(MoveMade)
    assert (made.move, made.workers, made.reason) == ("merge", [0], "so it is")
    assert (made.predicted_gain_s, made.predicted_cost_s, made.layout) == (3.0, 0.5, None)


def test_what_came_of_a_merge_is_told_at_the_end_of_the_step():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.switched()
    bench.now = 3.5
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    assert bench.widen.finish() == {"switches": 1.0}
    (ended,) = bench.of_kind(MoveEnded)
    assert (ended.move, ended.workers, ended.predicted_rest_s, ended.gain_s) == ("merge", [0], 4.0, None)
    assert ended.rest_s == pytest.approx(2.5)
    assert ended.cost_s == pytest.approx(0.2)
    assert (ended.moved_bytes, ended.recomputed_tokens, ended.refused) == (20, 3, None)


def test_a_spread_asks_for_even_loads_and_tells_the_newcomer_too():
    bench = on_one()
    assert bench.widen.relocate(relocation((0, 1), "spread"))
    bench.grant()
    assert [worker for worker, _ in bench.sent] == [0, 1]
    (_, command), _ = bench.sent
    assert (command.lease.workers, command.groups, command.rebalance) == ((0, 1), ((0,), (1,)), True)
    bench.switched()
    assert bench.widen.layout == Layout.narrow(2)
    assert bench.widen.merges_left == 2
    assert [made.move for made in bench.of_kind(MoveMade)] == ["place", "spread"]
    assert others_may_have(bench, 0, 1)


def test_after_a_merge_it_can_be_spread_again():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.switched()
    assert not bench.widen.relocate(relocation((0, 1), "spread")), "nobody has been heard of since"
    bench.hear({0: [[9, 10], [9, 8]]})
    assert bench.widen.relocate(relocation((0, 1), "spread"))
    bench.grant()
    bench.switched()
    bench.hear({0: [[10, 11]], 1: [[10, 9]]})
    assert bench.widen.workers == (0, 1)


def test_a_worker_whose_samples_have_ended_is_not_bothered():
    bench = Bench(workers=3, tp=1, company=True, lengths=(50, 60, 90, 80, 9, 9))
    bench.begin()
    bench.end(4, 5)
    bench.hear({0: [[8, 9]], 1: [[8, 7]]})
    assert bench.widen.workers == (0, 1)
    assert bench.widen.relocate(relocation((0,)))
    bench.grant()
    assert bench.sent[-1][1].lease.workers == (0, 1)
    assert bench.widen.layout == Layout(((0,),))


def test_everything_may_move_to_workers_that_had_nothing():
    bench = on_one(workers=3, lengths=(*FOUR, 9, 9))
    bench.end(4, 5)
    bench.widen.relocate(relocation((0, 2), "spread"))
    bench.grant()
    assert [worker for worker, _ in bench.sent] == [0, 1, 2]
    bench.switched()
    assert bench.widen.layout == Layout(((0,), (2,)))


# When not


def test_nothing_moves_before_every_request_is_with_a_worker_and_heard_of():
    bench = Bench(tp=1, company=True, lengths=FOUR)
    assert not bench.widen.relocate(relocation((0,))), "no rollout"
    bench.begin()
    assert not bench.widen.relocate(relocation((0,))), "nothing heard"
    bench.hear({0: [[8, 9]]})
    assert not bench.widen.relocate(relocation((0,))), "worker 1 not heard of"
    bench.hear({0: [[8, 9]], 1: [[8, 7]]}, dispatched=False)
    assert not bench.widen.relocate(relocation((0,))), "requests wait"
    bench.hear({0: [[8, 9]], 1: [[8, 7]]})
    assert bench.widen.relocate(relocation((0,)))


def test_one_move_at_a_time():
    bench = on_two()
    assert bench.widen.relocate(relocation((0,)))
    assert not bench.widen.relocate(relocation((1,))), "asked for"
    bench.grant()
    bench.hear({0: [[8, 9], [8, 7]]})
    assert not bench.widen.relocate(relocation((1,))), "under way"


def test_groups_are_not_relocated():
    bench = Bench(tp=2, lengths=FOUR, company=True)
    bench.begin()
    bench.grant()
    bench.switched()
    bench.hear({0: [[8, 9], [8, 7]]})
    assert not bench.widen.relocate(relocation((0,)))


def test_to_where_they_are_no_samples_are_moved():
    assert not on_two().widen.relocate(relocation((0, 1), "spread"))
    assert not on_one().widen.relocate(relocation((1,)))


def test_a_rollout_is_merged_as_often_as_the_policy_allows():
    bench = on_two(max_merges=1)
    assert bench.widen.merges_left == 1
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.switched()
    assert bench.widen.merges_left == 0
    bench.hear({0: [[9, 10], [9, 8]]})
    assert not bench.widen.relocate(relocation((1,)))
    assert bench.widen.relocate(relocation((0, 1), "spread"))


def test_a_rollout_that_ends_before_the_lease_is_there_asks_no_more():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    assert bench.book.grant() == []
    assert bench.widen.at_rest
    assert not bench.widen.relocate(relocation((0,)))


def test_a_rollout_that_ends_during_a_merge_waits_for_it_and_does_no_more():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    assert not bench.widen.at_rest
    bench.switched()
    assert bench.widen.at_rest
    assert len(bench.sent) == 2
    assert others_may_have(bench, 0, 1)


def test_a_refused_merge_leaves_everything_as_it_was_and_is_not_tried_again():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.switched(refused="there is no room")
    assert bench.widen.layout == Layout.narrow(2)
    assert [note.level for note in bench.of_kind(Note)] == ["warning"]
    bench.hear({0: [[8, 9]], 1: [[8, 7]]})
    assert not bench.widen.relocate(relocation((0,)))
    assert bench.widen.relocate(relocation((1,)))
    bench.widen.abandon()
    assert others_may_have(bench, 0, 1)


def test_a_refused_spread_leaves_the_newcomer_out():
    bench = on_one()
    bench.widen.relocate(relocation((0, 1), "spread"))
    bench.grant()
    bench.switched(refused="there is no room")
    assert bench.widen.layout == Layout(((1,),))


def test_an_abandoned_step_takes_its_merge_with_it():
    bench = on_two()
    bench.widen.relocate(relocation((0,)))
    bench.grant()
    bench.widen.abandon()
    assert others_may_have(bench, 0, 1)
    bench.switched()
    assert bench.widen.layout == Layout.narrow(2)


# What the planner is told


@pytest.mark.parametrize("company", [True, False])
def test_in_company_lengths_are_foretold_even_where_the_order_does_not_need_them(company):
    bench = Bench(tp=1, company=company, order="fifo")
    order = StepOrder(bench.plan, workers=2, emit=bench.events.append)
    order.begin(bench.batch, bench.requests, now=0.0)
    assert (order.live(bench.batch) is not None) is company


def test_live_samples_are_what_the_workers_said_of_them():
    bench = on_two()
    bench.end(0)
    bench.hear({0: [[-1, 9]], 1: [[0, 0]]})
    live = bench.widen.live_samples()
    assert live is not None
    assert live.worker.tolist() == [0, 1, 1]
    assert live.context.tolist() == [4 + 9, 4, 4]
    assert live.lanes.tolist() == [9 - 1 + 4, 0, 0]
    assert live.remaining.tolist() == [60 - 9, 90, 80]
    assert {array.dtype for array in vars(live).values()} == {np.dtype(np.int64)}


def test_samples_that_nobody_has_yet_are_told_apart_from_those_not_heard_of():
    bench = Bench(tp=1, company=True, lengths=FOUR)
    bench.begin(on=(0,))
    assert bench.widen.live_samples() is None
    bench.hear({0: [[8, 9]]}, dispatched=False)
    live = bench.widen.live_samples()
    assert live is not None
    assert live.worker.tolist() == [0, 0, -1, -1]
    assert live.context.tolist() == [12, 13, 4, 4]
    assert live.remaining.tolist() == [42, 51, 90, 80]
    bench.hear({0: [[8, 9]]}, dispatched=True)
    assert bench.widen.live_samples() is None


def test_during_a_switch_nothing_is_said_of_samples_since_two_workers_may_have_told_of_the_same_one():
    bench = on_two()
    assert bench.widen.relocate(relocation((0,)))
    assert bench.widen.live_samples() is not None, "nothing has moved yet"
    bench.grant()
    bench.hear({0: [[9, 10], [9, 8]]})
    bench.hear_from(1, {bench.requests[1].request_id: [8, 7]})
    assert bench.widen.live_samples() is None
    bench.switched()
    bench.hear({0: [[9, 10], [9, 8]]})
    live = bench.widen.live_samples()
    assert live is not None
    assert live.worker.tolist() == [0, 0, 0, 0]


def test_outside_of_a_rollout_no_sample_is_live():
    bench = Bench(tp=1)
    assert len(bench.widen.live_samples()) == 0
    bench.begin()
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    assert len(bench.widen.live_samples()) == 0


def test_costs_are_those_of_the_table_that_was_found():
    assert Bench(costs=None).widen.costs is None
    bench = on_two()
    assert bench.widen.costs.degrees == (1, 2, 4)


def test_a_worker_that_is_in_no_group_counts_as_on_its_own():
    layout = Layout(((0, 1), (3,)))
    assert layout.workers == (0, 1, 3)
    assert [layout.group_of(worker) for worker in range(4)] == [(0, 1), (0, 1), (2,), (3,)]
    assert layout.replaced(((0,), (1,))) == Layout.singles((3, 1, 0))
    assert str(Layout.singles((2,))) == "TP1"
