"""When groups become wider or narrower: never without a gain, at the best moment, and by what the policy says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.types import Layout
from longtail.planner.order import Work
from longtail.planner.plans import best_plan
from longtail.planner.release import worth_keeping
from longtail.planner.start import start_layout
from longtail.planner.tree import Tree
from longtail.planner.widen import Action, Auto, Static, Threshold, decide, predicted_end_s
from planner.rollouts import block_of, rollout, stepwise_end_s, table

PAIR, FOUR = [(0,), (1,)], [(0,), (1,), (2,), (3,)]
FASTER = {1: (0.010, 0.0010, 1e-6), 2: (0.006, 0.0006, 6e-7)}
"""A group of two does any step in 0.6 of the time of a worker with the same sequences."""
TAIL_ONLY = {1: (0.010, 0.0010, 0.0), 2: (0.005, 0.0020, 0.0)}
"""A group of two is faster for few sequences only."""


def actions(state, costs, policy=None):
    return [(d.action, d.before, d.after) for d in decide(state, costs, policy or Auto())]


lengths = st.lists(st.integers(1, 80), min_size=1, max_size=8)


@st.composite
def pairs_of_workers(draw, least=1, most=80, waits=True):
    n = draw(st.integers(1, 8))
    numbers = st.lists(st.integers(least, most), min_size=n, max_size=n)
    of = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    waiting = draw(st.integers(0, n - 1)) if waits else 0
    running = np.bincount(of[: n - waiting], minlength=2).max()
    return rollout(
        PAIR,
        np.array(draw(st.lists(numbers, min_size=1, max_size=3))),
        of=of,
        context=draw(st.lists(st.integers(1, 300), min_size=n, max_size=n)),
        waiting=waiting,
        slots=int(running) + draw(st.sampled_from([0, 1, 64])),
    )


step_costs = st.tuples(st.floats(1e-3, 0.1), st.floats(0.0, 0.01), st.floats(0.0, 1e-5))


@settings(deadline=None)
@given(state=pairs_of_workers(), one=step_costs, more=step_costs, handshake_s=st.floats(0.0, 1.0))
def test_groups_are_never_merged_where_merged_steps_are_not_faster(state, one, more, handshake_s):
    not_faster = tuple(a + b for a, b in zip(one, more, strict=True))
    costs = table({1: one, 2: not_faster}, handshake_s=handshake_s)
    assert all(action == Action.HOLD for action, *_ in actions(state, costs))


@settings(deadline=None)
@given(state=pairs_of_workers(least=60, most=90, waits=False))
def test_faster_steps_at_no_cost_are_taken_at_once(state):
    free = table({1: (0.01, 1e-3, 1e-6), 2: (0.004, 3e-4, 1e-7)}, prefill_s=1e-9)
    assert actions(state, free) == [(Action.WIDEN, tuple(PAIR), ((0, 1),))]


@settings(deadline=None, max_examples=40)
@given(
    state=pairs_of_workers(most=30),
    wide=st.tuples(st.floats(0.3, 1.2), st.floats(0.3, 2.0), st.floats(0.3, 1.2)),
    handshake_s=st.floats(0.0, 0.3),
    move_byte_s=st.floats(0.0, 3e-7),
)
def test_with_known_lengths_the_best_moment_is_found_within_a_step(state, wide, handshake_s, move_byte_s):
    steps = {1: (0.01, 0.001, 3e-6), 2: tuple(a * b for a, b in zip((0.01, 0.001, 3e-6), wide, strict=True))}
    costs = table(steps, handshake_s=handshake_s, move_byte_s=move_byte_s)
    known = rollout(PAIR, state.remaining[0], of=state.of, context=state.context, slots=state.slots[1])
    block, prices = block_of(known, costs)
    tree = Tree.over((0, 1), costs.degrees)
    found_s = best_plan(block, (0, 1), tree, prices).mean_s
    to = [0] * len(known.of)
    step_s = block.step_s(prices)
    moments = np.arange(int(known.remaining.max()) + 1) * costs.decode_s(1, 1, 0)
    every = [stepwise_end_s(known, costs, [(0, 1)], to, after_s=float(s)) for s in moments]
    best_s = min(*every, stepwise_end_s(known, costs, [(0, 1)], to))
    assert found_s <= best_s + step_s


@settings(deadline=None)
@given(state=pairs_of_workers(least=40), handshake_s=st.floats(0.0, 0.2), more_s=st.floats(0.0, 0.2))
def test_a_dearer_switch_never_comes_earlier(state, handshake_s, more_s):
    dear = table(FASTER, handshake_s=handshake_s + more_s)
    cheap = table(FASTER, handshake_s=handshake_s)
    if actions(state, dear)[0][0] == Action.WIDEN:
        assert actions(state, cheap)[0][0] == Action.WIDEN


def test_predictions_of_a_decision_are_those_of_decoding_step_by_step():
    state = rollout(PAIR, [400, 30, 350, 20], context=[50, 60, 70, 80])
    costs = table(FASTER, handshake_s=0.05)
    (decision,) = decide(state, costs, Auto())
    assert decision.action == Action.WIDEN
    together = [0] * 4
    assert decision.finish_now_s == pytest.approx(stepwise_end_s(state, costs, [(0, 1)], together))
    assert decision.finish_then_s == pytest.approx(stepwise_end_s(state, costs, [(0, 1)], together, after_s=0.0))
    assert decision.finish_now_s == pytest.approx(predicted_end_s(state, costs))
    assert decision.predicted_cost_s == pytest.approx(0.05)
    saved_s = decision.finish_now_s - decision.finish_then_s
    assert decision.predicted_gain_s == pytest.approx(saved_s + decision.predicted_cost_s)
    assert decision.parts == ((0, 1, 2, 3),)


def test_a_switch_waits_for_sequences_that_end_soon():
    """Three of four sequences have long contexts to move and end in 20 steps, though steps would be faster at once."""
    costs = table({1: (0.010, 0.0, 0.0), 2: (0.007, 0.0, 0.0)}, move_byte_s=1e-6, prefill_s=1.0)
    state = rollout(PAIR, [20, 20, 20, 2000], context=[2000, 2000, 2000, 100])
    (decision,) = decide(state, costs, Auto())
    assert decision.action == Action.HOLD
    assert decision.wait_s == pytest.approx(20 * 0.010)
    assert decision.finish_then_s < decision.finish_now_s
    later = rollout(PAIR, [1980], of=[1], context=120)
    assert actions(later, costs) == [(Action.WIDEN, tuple(PAIR), ((0, 1),))]


def test_a_switch_waits_while_the_batch_is_too_large():
    state = rollout(PAIR, [50] * 15 + [1000])
    assert actions(state, table(TAIL_ONLY))[0][0] == Action.HOLD
    assert actions(rollout(PAIR, [950]), table(TAIL_ONLY))[0][0] == Action.WIDEN


def test_a_gain_that_is_small_beside_what_is_left_is_not_taken():
    costs = table({1: (0.010, 0.0, 0.0), 2: (0.0099, 0.0, 0.0)})
    assert actions(rollout(PAIR, [5000, 5000]), costs)[0][0] == Action.HOLD


def test_a_worker_without_a_sequence_takes_its_part():
    state = rollout(PAIR, [500, 500], of=[0, 0])
    assert actions(state, table(FASTER)) == [(Action.WIDEN, tuple(PAIR), ((0, 1),))]


def test_workers_without_a_sequence_take_part_in_a_larger_group_too():
    costs = table({**FASTER, 4: (0.0035, 0.0004, 3e-7)})
    state = rollout(FOUR, [800, 700], of=[0, 0])
    assert actions(state, costs) == [(Action.WIDEN, tuple(FOUR), ((0, 1, 2, 3),))]
    apart = rollout([(0,), (1,), (2, 3)], [800, 700], of=[0, 0])
    assert actions(apart, costs) == [(Action.WIDEN, ((0,), (1,), (2, 3)), ((0, 1, 2, 3),))]


def test_a_group_without_a_slot_is_refused():
    with pytest.raises(ValueError, match="slot"):
        rollout(PAIR, [5, 5], slots=0)


def test_pairs_decide_on_their_own():
    state = rollout(FOUR, [900] + [60] * 24, of=[0] + [2, 3] * 12)
    decisions = actions(state, table(TAIL_ONLY, kv_heads=2))
    assert (Action.WIDEN, ((0,), (1,)), ((0, 1),)) in decisions
    assert (Action.HOLD, ((2,), (3,)), ((2,), (3,))) in decisions


def test_four_workers_become_one_group_at_once_where_that_is_best():
    costs = table({**FASTER, 4: (0.0035, 0.0004, 3e-7)}, handshake_s=0.05)
    state = rollout(FOUR, [800, 700, 600, 500])
    assert actions(state, costs) == [(Action.WIDEN, tuple(FOUR), ((0, 1, 2, 3),))]


def test_four_workers_become_pairs_where_four_together_are_no_faster():
    costs = table({**FASTER, 4: (0.02, 0.002, 1e-6)})
    state = rollout(FOUR, [800, 700, 600, 500])
    assert sorted(after for _, _, (after,) in actions(state, costs)) == [(0, 1), (2, 3)]


def test_degrees_that_were_not_measured_are_never_chosen():
    one_only = table({1: FASTER[1]})
    assert decide(rollout(PAIR, [500, 500]), one_only, Auto()) == []
    two_and_eight = table({**FASTER, 8: (1e-3, 1e-4, 1e-7)}, kv_heads=8)
    after = [after for _, _, after in actions(rollout(FOUR, [800, 700, 600, 500]), two_and_eight)]
    assert sorted(after) == [((0, 1),), ((2, 3),)]


def test_more_workers_than_kv_heads_never_form_a_group():
    costs = table({**FASTER, 4: (1e-3, 1e-4, 1e-7)}, kv_heads=3)
    after = [after for _, _, after in actions(rollout(FOUR, [800, 700, 600, 500]), costs)]
    assert sorted(after) == [((0, 1),), ((2, 3),)]


def test_a_wide_group_that_turns_out_slow_is_taken_apart():
    slow = table({1: (0.010, 0.001, 0.0), 2: (0.020, 0.002, 0.0)}, handshake_s=0.01)
    state = rollout([(0, 1)], [500, 450, 400, 350])
    (decision,) = decide(state, slow, Auto())
    assert (decision.action, decision.before, decision.after) == (Action.NARROW, ((0, 1),), ((0,), (1,)))
    assert sorted(i for part in decision.parts for i in part) == [0, 1, 2, 3]
    assert all(len(part) == 2 for part in decision.parts)
    assert decision.finish_then_s < decision.finish_now_s
    assert decision.predicted_cost_s >= 0.01


def test_a_wide_group_is_kept_where_taking_it_apart_costs_more_than_it_saves():
    slow = table({1: (0.010, 0.001, 0.0), 2: (0.020, 0.002, 0.0)}, handshake_s=20.0)
    assert actions(rollout([(0, 1)], [500, 450, 400, 350]), slow)[0][0] == Action.HOLD
    assert actions(rollout([(0, 1)], [500, 450]), table(FASTER))[0][0] == Action.HOLD


@settings(deadline=None, max_examples=60)
@given(state=pairs_of_workers(least=40), handshake_s=st.floats(0.0, 0.1), wide=step_costs)
def test_what_is_done_at_once_is_never_undone_at_once(state, handshake_s, wide):
    costs = table({1: FASTER[1], 2: wide}, handshake_s=handshake_s)
    (first,) = decide(state, costs, Auto())
    n, waiting = len(state.of), int((state.lanes == 0).sum())
    wider = rollout([(0, 1)], state.remaining, of=[0] * n, context=state.context, waiting=waiting, slots=state.slots[1])
    if first.action == Action.WIDEN:
        assert all(d.action == Action.HOLD for d in decide(wider, costs, Auto()))


# -- other policies


def test_a_fixed_degree_decides_nothing():
    assert decide(rollout(PAIR, [500, 500]), table(FASTER), Static(1)) == []


@given(n=st.integers(1, 8), most=st.integers(1, 8))
@settings(deadline=None)
def test_the_threshold_merges_a_pair_with_at_most_so_many_sequences(n, most):
    (decision, *_) = decide(rollout(PAIR, [500] * n), table(FASTER), Threshold(most)) or [None]
    assert (decision is not None) == (n <= most)
    if decision is not None:
        assert (decision.action, decision.after) == (Action.WIDEN, ((0, 1),))


def test_the_threshold_waits_for_those_that_wait():
    assert decide(rollout(PAIR, [500] * 3, waiting=1), table(FASTER), Threshold(8)) == []


def test_the_threshold_merges_the_whole_tree_if_few_are_left():
    costs = table({**FASTER, 4: (0.0035, 0.0004, 3e-7)})
    few, many = rollout(FOUR, [500] * 4), rollout(FOUR, [500] * 6, of=[0, 0, 0, 1, 2, 3])
    assert [d.after for d in decide(few, costs, Threshold(4))] == [((0, 1, 2, 3),)]
    assert [d.after for d in decide(many, costs, Threshold(4))] == [((0, 1),), ((2, 3),)]
    assert [d.after for d in decide(many, costs, Threshold(2))] == [((2, 3),)]


def test_equal_arguments_give_equal_decisions():
    rng = np.random.default_rng(0)
    remaining = rng.lognormal(5, 1, (16, 40)).astype(int) + 1
    costs = table({**FASTER, 4: (0.0035, 0.0004, 3e-7)}, handshake_s=0.05, move_byte_s=1e-9)
    assert decide(rollout(FOUR, remaining), costs, Auto()) == decide(rollout(FOUR, remaining), costs, Auto())


def test_groups_that_are_no_nodes_of_the_tree_are_refused():
    with pytest.raises(ValueError, match="no layout that can be switched"):
        decide(rollout([(0,), (1, 2), (3,)], [5, 5, 5]), table(FASTER, kv_heads=2), Auto())


# -- the start


def work(lengths: list[int], samples: int = 1) -> Work:
    requests = len(lengths) // samples
    return Work.known(np.full(requests, samples), np.full(requests, 20), np.array(lengths))


def test_a_rollout_begins_wide_where_wide_is_always_faster():
    always = table({1: (0.010, 0.0010, 0.0), 2: (0.006, 0.0004, 0.0)}, prefill_s=1e-6)
    start = start_layout(work([100] * 16), 2, {1: 64, 2: 128}, always, Auto())
    assert start.layout == Layout(((0, 1),))
    assert start.predicted_s[2] < start.predicted_s[1]


def test_a_rollout_begins_narrow_where_only_its_tail_is_faster_wide():
    lengths = [100] * 30 + [1500] * 2
    costs = table(TAIL_ONLY, prefill_s=1e-6, handshake_s=0.01)
    start = start_layout(work(lengths), 2, {1: 64, 2: 128}, costs, Auto())
    assert start.layout == Layout.narrow(2)
    no_switch = table({1: TAIL_ONLY[1]}, prefill_s=1e-6)
    narrow_s = start_layout(work(lengths), 2, {1: 64, 2: 128}, no_switch, Auto())
    assert narrow_s.layout == Layout.narrow(2)
    dear = table(TAIL_ONLY, prefill_s=1e-6, handshake_s=1e3)
    held_s = start_layout(work(lengths), 2, {1: 64, 2: 128}, dear, Auto()).predicted_s[1]
    assert start.predicted_s[1] < 0.9 * held_s  # it is valued with the option to widen


def test_policies_that_weigh_nothing_begin_as_they_say():
    slots = {1: 64, 2: 128}
    assert start_layout(work([100] * 4), 2, slots, table(FASTER), Static(2)).layout == Layout(((0, 1),))
    assert start_layout(work([100] * 4), 2, slots, table(FASTER), Threshold(3)).layout == Layout.narrow(2)


# -- letting go


def test_a_wide_group_is_kept_while_nobody_waits_and_given_up_when_many_do():
    state = rollout([(0, 1)], [1000, 900])
    costs = table(FASTER, handshake_s=0.01)
    assert worth_keeping(state, (0, 1), costs, waiting=0).keep
    assert not worth_keeping(state, (0, 1), costs, waiting=6).keep


def test_a_group_that_gains_all_that_its_workers_are_worth_is_kept():
    halved = table({1: (0.010, 0.001, 0.0), 2: (0.004, 0.0004, 0.0)})
    assert worth_keeping(rollout([(0, 1)], [1000, 900]), (0, 1), halved, waiting=3).keep


def test_letting_go_is_weighed_with_the_switch():
    state = rollout([(0, 1)], [40])
    costs = table(FASTER, handshake_s=5.0)
    assert worth_keeping(state, (0, 1), costs, waiting=3).keep
