"""Predicted ends are those of decoding step by step, whenever groups are changed on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.planner.rollout_time import warm_up
from planner.rollouts import block_of, rollout, stepwise_end_s, table

COSTS = table(
    {1: (0.010, 0.0010, 3e-6), 2: (0.007, 0.0007, 2e-6), 4: (0.005, 0.0004, 1e-6)},
    handshake_s=0.02, move_s=0.005, move_byte_s=2e-8,
)  # fmt: skip
NARROW, PAIRS, WIDE = ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)


@st.composite
def states(draw, groups=NARROW, waits=True):
    n = draw(st.integers(1, 9))
    numbers = st.lists(st.integers(1, 60), min_size=n, max_size=n)
    return rollout(
        groups,
        np.array(draw(st.lists(numbers, min_size=1, max_size=2))),
        of=draw(st.lists(st.integers(0, len(groups) - 1), min_size=n, max_size=n)),
        context=draw(st.lists(st.integers(1, 500), min_size=n, max_size=n)),
        waiting=draw(st.integers(0, n)) if waits else 0,
        slots=draw(st.sampled_from([1, 2, 64])),
    )


@settings(deadline=None, max_examples=150)
@given(state=states(), behind=st.sampled_from([PAIRS, WIDE]), data=st.data())
def test_predicted_ends_are_those_of_decoding_step_by_step(state, behind, data):
    check_against_steps(state, behind, data)


@settings(deadline=None, max_examples=60)
@given(state=states(WIDE), behind=st.sampled_from([PAIRS, NARROW]), data=st.data())
def test_predicted_ends_of_narrowing_are_those_of_decoding_step_by_step(state, behind, data):
    check_against_steps(state, behind, data)


def check_against_steps(state, behind, data):
    n = len(state.of)
    to = [next(h for h, b in enumerate(behind) if set(b) & set(state.groups[g])) for g in state.of.tolist()]
    if len(behind) > len(state.groups):
        to = data.draw(st.lists(st.integers(0, len(behind) - 1), min_size=n, max_size=n))
    after_s = np.array([0.0, *sorted(data.draw(st.lists(st.floats(1e-3, 1.0), max_size=2)))])
    left = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else (), reverse=True)
    block, costs = block_of(state, COSTS)
    times = block.times(costs, behind, np.array(to)[block.who], after_s, np.array(left, np.int64))
    for k in range(len(state.remaining)):
        expected = [stepwise_end_s(state, COSTS, behind, to, after_s=s, outcome=k) for s in after_s]
        expected += [stepwise_end_s(state, COSTS, behind, to, left=count, outcome=k) for count in left]
        assert times.end_s[:, k] == pytest.approx(expected, rel=1e-9)
        assert times.stay_s[k] == pytest.approx(stepwise_end_s(state, COSTS, behind, to, outcome=k), rel=1e-9)


def test_no_more_sequences_run_than_there_are_slots():
    one_by_one = rollout([(0,)], [10] * 6, context=1, slots=1)
    at_once = rollout([(0,)], [10] * 6, context=1, slots=6)
    flat = table({1: (1.0, 0.0, 0.0)}, prefill_s=1e-9)
    ends = []
    for state in (one_by_one, at_once):
        waits = rollout([(0,)], [10] * 6, context=1, slots=state.slots[1], waiting=6)
        block, costs = block_of(waits, flat)
        ends.append(float(block.stay_s(costs)[0]))
    assert ends == pytest.approx([6 * 9, 9], rel=1e-6)  # the prefill draws the first token


def test_lanes_that_move_cost_what_the_busiest_worker_sends_or_takes():
    costs = table({1: (1e-3, 0.0, 0.0), 2: (1e-3, 0.0, 0.0)}, move_byte_s=1e-6, prefill_s=1.0)
    state = rollout([(0,), (1,)], [5, 5, 5], of=[0, 0, 1], context=[100, 200, 50])
    block, prices = block_of(state, costs)
    cost = block.times(prices, ((0, 1),), np.zeros(3, int), np.zeros(1)).switch_s[0, 0]
    # Worker 0 keeps 4 of 8 heads of its 300 tokens and sends 4, worker 1 sends 4 heads of 50 tokens; 100 bytes each.
    assert cost == pytest.approx(300 * 4 * 100 * 1e-6)


def test_lanes_are_computed_anew_where_that_is_cheaper():
    slow = table({1: (1e-3, 0.0, 0.0), 2: (1e-3, 0.0, 0.0)}, move_byte_s=1.0, prefill_s=1e-3)
    state = rollout([(0,), (1,)], [5, 5], context=[100, 200])
    block, prices = block_of(state, slow)
    cost = block.times(prices, ((0, 1),), np.zeros(2, int), np.zeros(1)).switch_s[0, 0]
    assert cost == pytest.approx(300 * 1e-3)


def test_the_kernel_can_be_compiled_before_anything_is_known():
    warm_up()
