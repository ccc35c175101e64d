"""The layout of a rollout: one switch at a time, each under its lease, and single workers again in the end."""

from __future__ import annotations

import pytest

from longtail.core.events import MoveEnded, MoveMade, Note
from longtail.core.types import Layout
from planner.rollouts import table
from runtime.widen_bench import Bench

SLOWER = table({1: (0.02, 0.001, 0.0), 2: (0.2, 0.001, 0.0)}, kv_heads=4)


def in_the_tail(**options) -> Bench:
    """One sample is left, of a rollout that began narrow because others had work then."""
    bench = Bench(**options)
    bench.contended, contended = True, bench.contended
    assert bench.begin()
    bench.contended = contended
    bench.end(0, 1, 3)
    bench.now = 1.0
    bench.hear({0: [[-1, -1]], 1: [[8, -1]]})
    return bench


def test_a_fixed_degree_is_taken_before_the_first_request_goes_out():
    bench = Bench(workers=4, tp=2, lengths=(5,) * 8)
    assert not bench.begin()
    assert bench.grant()
    assert bench.widen.layout == Layout(((0, 1), (2, 3)))
    assert [worker for worker, _ in bench.sent] == [0, 1, 2, 3]
    assert {command.groups for _, command in bench.sent} == {((0, 1), (2, 3))}


def test_where_wide_groups_are_faster_from_the_start_the_rollout_begins_wide():
    bench = Bench()
    assert not bench.begin()
    assert bench.grant()
    (made,) = bench.of_kind(MoveMade)
    assert (made.move, made.layout, made.workers) == ("widen", "TP2", [0, 1])
    assert made.predicted_gain_s > 0
    bench.switched()
    bench.now = 2.0
    bench.end(0, 1, 2, 3)
    bench.widen.rollout_over()
    bench.switched()
    bench.widen.finish()
    (ended,) = bench.of_kind(MoveEnded)
    assert ended.rest_s == pytest.approx(2.0)
    assert ended.cost_s == pytest.approx(0.2)
    assert (ended.moved_bytes, ended.recomputed_tokens) == (20, 3)


def test_where_they_are_slower_nothing_is_ever_switched():
    bench = in_the_tail(costs=SLOWER)
    assert bench.sent == []
    assert bench.book.grant() == []


def test_the_tail_is_widened_under_a_lease_and_dissolved_when_the_rollout_is_over():
    bench = in_the_tail()
    assert not bench.grant()
    assert [worker for worker, _ in bench.sent] == [0, 1]
    bench.switched()
    assert bench.widen.layout == Layout(((0, 1),))
    bench.book.ask("other", (1,))
    assert bench.book.grant() == []
    bench.now = 3.0
    bench.end(2)
    bench.widen.rollout_over()
    assert bench.sent[-1][0] == 0
    assert bench.sent[-1][1].groups == ((0,), (1,))
    bench.switched()
    assert bench.widen.layout == Layout.narrow(2)
    assert [lease.pipeline for lease in bench.book.grant()] == ["other"]
    bench.widen.finish()
    (ended,) = bench.of_kind(MoveEnded)
    assert ended.rest_s == pytest.approx(2.0)
    assert ended.gain_s == pytest.approx(82 * 0.021 - 2.0, rel=0.01)


def test_nothing_is_decided_before_every_live_sample_has_been_heard_of():
    bench = Bench(contended=True)
    bench.begin()
    bench.contended = False
    bench.end(0, 1)
    bench.hear({0: [[-1, -1]]})
    assert bench.book.grant() == []


def test_a_rollout_that_ends_while_it_waits_for_its_lease_asks_no_more():
    bench = in_the_tail()
    bench.end(2)
    bench.widen.rollout_over()
    assert bench.book.grant() == []
    assert bench.sent == []


def test_a_rollout_that_ends_while_its_switch_is_under_way_is_dissolved_afterwards():
    bench = in_the_tail()
    bench.grant()
    bench.end(2)
    bench.widen.rollout_over()
    assert len(bench.sent) == 2
    bench.switched()
    assert bench.sent[-1][1].groups == ((0,), (1,))
    bench.switched()
    bench.book.ask("a", (0, 1))
    assert [lease.purpose for lease in bench.book.grant()] == ["update"]


def test_a_refused_switch_is_told_once_and_not_tried_again_in_this_step():
    bench = in_the_tail()
    bench.grant()
    bench.switched(refused="there is no room")
    assert bench.widen.layout == Layout.narrow(2)
    bench.hear({0: [[-1, -1]], 1: [[9, -1]]})
    assert bench.book.grant() == []
    assert [note.level for note in bench.of_kind(Note)] == ["warning"]
    bench.end(2)
    bench.widen.rollout_over()
    bench.widen.finish()
    (ended,) = bench.of_kind(MoveEnded)
    assert ended.refused == "there is no room"
    assert ended.gain_s is None


def test_while_others_have_work_nothing_is_widened():
    bench = in_the_tail(contended=True)
    assert bench.book.grant() == []


def test_a_long_tail_gives_its_workers_back_when_others_come_to_need_them():
    costs = table({1: (0.02, 0.001, 0.0), 2: (0.018, 0.001, 0.0)}, kv_heads=4)
    bench = in_the_tail(costs=costs)
    bench.grant()
    bench.switched()
    bench.contended = True
    bench.hear({0: [[-1, -1], [9, -1]]})
    assert not bench.grant()
    assert bench.sent[-1][1].groups == ((0,), (1,))
    assert bench.of_kind(MoveMade)[-1].move == "narrow"
    bench.switched()
    bench.book.ask("other", (0, 1))
    assert [lease.pipeline for lease in bench.book.grant()] == ["other"]


def test_an_abandoned_step_leaves_no_lease_behind():
    bench = in_the_tail()
    bench.grant()
    bench.widen.abandon()
    bench.book.ask("other", (0, 1))
    assert [lease.pipeline for lease in bench.book.grant()] == ["other"]


def test_a_threshold_merges_pairs_on_their_own():
    bench = Bench(workers=4, tp="threshold:3", lengths=(9, 9, 9, 9, 50, 5, 50, 5))
    assert bench.begin()
    bench.end(5, 7)
    bench.hear({0: [[6, 6]], 1: [[6, 6]], 2: [[6, -1]], 3: [[6, -1]]})
    bench.grant()
    assert {command.groups for _, command in bench.sent} == {((2, 3),)}
    assert [worker for worker, _ in bench.sent] == [2, 3]


def test_a_job_that_forbids_widening_stays_on_single_workers():
    for tp in ("auto", "threshold:4"):
        bench = Bench(tp=tp, may_widen=False)
        assert bench.begin()
        bench.end(0, 1, 3)
        bench.hear({0: [[-1, -1]], 1: [[8, -1]]})
        assert bench.book.grant() == []
        assert not Bench(tp=tp, may_widen=False, costs=None).widen.wants_profile


def test_a_fixed_degree_is_taken_also_where_widening_is_forbidden():
    bench = Bench(workers=4, tp=2, lengths=(5,) * 8, may_widen=False)
    assert not bench.begin()
    assert bench.grant()
    assert bench.widen.degree == 2


@pytest.mark.parametrize(("tp", "company", "wants"), [("auto", False, True), (1, False, False), (1, True, True)])
def test_costs_are_wanted_where_something_is_decided_by_them(tp, company, wants):
    assert Bench(tp=tp, company=company, costs=None).widen.wants_profile is wants
    assert not Bench(tp=tp, company=company).widen.wants_profile
