"""Placement of requests: exactly once, balanced, never predicted to be slower than first come first served."""

from __future__ import annotations

import itertools
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.costs.decode import DecodeCosts
from longtail.planner.dispatch import Dispatch
from longtail.planner.makespan import makespan_s
from longtail.planner.order import Placement, Rule, Work, fifo, place

COSTS = DecodeCosts(base_s=0.01, per_sequence_s=0.001, per_context_token_s=1e-6, per_prompt_token_s=1e-4)


def known(lengths: list[list[int]], prompt_tokens: int = 5) -> Work:
    """Requests by the lengths of their samples."""
    samples = np.array([len(row) for row in lengths])
    return Work.known(samples, np.full(len(lengths), prompt_tokens), np.array([n for row in lengths for n in row]))


def as_fast(factor: float) -> DecodeCosts:
    return DecodeCosts(**{name: factor * value for name, value in asdict(COSTS).items()})


def predicted(work: Work, placement: Placement, costs: list[DecodeCosts], slots: int) -> float:
    queue = np.array([r for q in placement.queues for r in q], np.int64)
    bounds = np.append(0, np.cumsum([len(q) for q in placement.queues]))
    table = np.array([[c.base_s, c.per_sequence_s, c.per_context_token_s, c.per_prompt_token_s] for c in costs])
    return makespan_s(
        work.lengths[0], work.first, work.prompt_tokens, work.expected, queue, bounds, placement.late, slots,
        int(work.samples.max()), table,
    )  # fmt: skip


def step_by_step(work: Work, placement: Placement, costs: list[DecodeCosts], slots: int) -> float:
    """The same makespan, one decode step after the other, with the dispatch that a run uses."""
    first = work.first
    dispatch = Dispatch(placement, samples=work.samples.tolist(), slots=slots)
    waiting: list[list[tuple[int, int]]] = [[] for _ in costs]  # (request, sample)
    running: list[list[list[int]]] = [[] for _ in costs]  # [context, tokens left]
    clock = [0.0] * len(costs)

    def arrive(worker: int, requests: list[int]) -> None:
        waiting[worker] += [(r, s) for r in requests for s in range(work.samples[r])]

    def fill(worker: int) -> None:
        while waiting[worker] and len(running[worker]) < slots:
            r, s = waiting[worker].pop(0)
            if s == 0:
                clock[worker] += work.prompt_tokens[r] * costs[worker].per_prompt_token_s
            left = work.lengths[0][first[r] + s] - 1
            if left:
                running[worker].append([work.prompt_tokens[r] + 1, left])
            else:
                ended[worker] = clock[worker]
                arrive(worker, dispatch.ended(worker))

    ended = [0.0] * len(costs)
    for worker, requests in enumerate(dispatch.start()):
        arrive(worker, requests)
    for worker in range(len(costs)):
        fill(worker)
    while any(running):
        # The worker whose next event (an end of some sequence) comes first.
        def next_end(worker: int) -> float:
            batch = running[worker]
            steps = min(left for _, left in batch)
            return clock[worker] + sum(
                costs[worker].step_s(len(batch), sum(context for context, _ in batch) + i * len(batch))
                for i in range(steps)
            )

        worker = min((w for w in range(len(costs)) if running[w]), key=next_end)
        while not any(left == 0 for _, left in running[worker]):
            batch = running[worker]
            clock[worker] += costs[worker].step_s(len(batch), sum(context for context, _ in batch))
            for sequence in batch:
                sequence[0] += 1
                sequence[1] -= 1
        ended[worker] = clock[worker]
        over = sum(left == 0 for _, left in running[worker])
        running[worker] = [s for s in running[worker] if s[1]]
        for _ in range(over):
            arrive(worker, dispatch.ended(worker))
        fill(worker)
    return max(ended)


groups = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=12)


@settings(deadline=None)
@given(lengths=groups, workers=st.integers(1, 5), slots=st.integers(1, 6))
def test_every_request_is_placed_exactly_once(lengths, workers, slots):
    placement = place(known(lengths), costs=[COSTS] * workers, slots=slots)
    assert len(placement.queues) == workers
    assert sorted(r for queue in placement.queues for r in queue) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths=groups, workers=st.integers(1, 5), slots=st.integers(1, 6), data=st.data())
def test_dispatch_hands_out_every_request_exactly_once_whoever_ends_first(lengths, workers, slots, data):
    placement = place(known(lengths), costs=[COSTS] * workers, slots=slots)
    dispatch = Dispatch(placement, samples=[len(row) for row in lengths], slots=slots)
    given_out = dispatch.start()
    held = [sum(len(lengths[r]) for r in requests) for requests in given_out]
    while any(held):
        worker = data.draw(st.sampled_from([w for w in range(workers) if held[w]]))
        more = dispatch.ended(worker)
        held[worker] += sum(len(lengths[r]) for r in more) - 1
        given_out[worker] += more
    assert sorted(r for requests in given_out for r in requests) == list(range(len(lengths)))


@settings(deadline=None)
@given(lengths=groups, workers=st.integers(1, 4), slots=st.integers(1, 5))
@example(lengths=[[1, 1], [1], [1], [1], [1, 2]], workers=2, slots=1)
def test_the_predicted_makespan_is_that_of_decoding_step_by_step(lengths, workers, slots):
    # Different speeds: of two ends at the same moment, rounding would decide which comes first.
    work, costs = known(lengths), [as_fast(1.0 + 0.0137 * worker) for worker in range(workers)]
    placement = place(work, costs=costs, slots=slots)
    assert placement.makespan_s == pytest.approx(step_by_step(work, placement, costs, slots), rel=1e-9)
    first_come = fifo(len(lengths), workers)
    assert placement.fifo_s == pytest.approx(step_by_step(work, first_come, costs, slots), rel=1e-9)


@settings(deadline=None)
@given(lengths=groups, workers=st.integers(1, 5), slots=st.integers(1, 6))
def test_it_is_never_predicted_to_be_slower_than_first_come_first_served(lengths, workers, slots):
    work, costs = known(lengths), [COSTS] * workers
    placement = place(work, costs=costs, slots=slots)
    assert placement.makespan_s <= placement.fifo_s
    assert placement.makespan_s == pytest.approx(predicted(work, placement, costs, slots))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=7), workers=st.integers(1, 3))
def test_known_lengths_are_placed_within_four_thirds_of_the_optimum(lengths, workers):
    """Graham's bound for one sequence at a time; the optimum by trying every assignment."""
    costs = [DecodeCosts(base_s=1.0, per_sequence_s=0.0)] * workers
    placement = place(known([[n] for n in lengths], prompt_tokens=0), costs=costs, slots=1)
    assignments = itertools.product(range(workers), repeat=len(lengths))
    steps = np.array(lengths) - 1  # the prefill draws the first token
    optimum = min(max(np.bincount(a, steps, workers)) for a in assignments)
    assert placement.makespan_s <= optimum * 4 / 3 + 1e-9


def test_equal_arguments_give_equal_placements():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4, 1, (40, 4)).astype(int) + 1
    one, other = (place(known(lengths.tolist()), costs=[COSTS] * 3, slots=6) for _ in range(2))
    assert one == other


def test_known_lengths_go_longest_first_and_evenly():
    placement = place(known([[n] for n in (10, 90, 20, 80, 30, 70)]), costs=[COSTS] * 2, slots=1)
    assert placement.queues == ((1, 4, 2, 0), (3, 5))
    assert placement.rule == Rule.LONGEST


def test_a_worker_that_is_twice_as_fast_gets_about_twice_the_tokens():
    fast, slow = (DecodeCosts(base_s=s, per_sequence_s=s / 10) for s in (0.01, 0.02))
    work = known([[n] for n in range(20, 120)])
    placement = place(work, costs=[fast, slow], slots=4)
    tokens = [sum(work.expected[r] for r in queue) for queue in placement.queues]
    assert tokens[0] / tokens[1] == pytest.approx(2, rel=0.05)


def test_prompts_that_nobody_can_tell_apart_stay_in_their_order():
    """Then only late binding is left to gain."""
    levels = np.tile(np.geomspace(1, 1000, 32), (24, 1))
    rng = np.random.default_rng(0)
    lengths = rng.choice(levels[0].astype(int), (16, 24 * 4))
    work = Work.uncertain(np.full(24, 4), np.full(24, 5), np.maximum(lengths, 1), levels)
    placement = place(work, costs=[COSTS] * 2, slots=8)
    assert placement.late
    assert all(list(queue) == sorted(queue) for queue in placement.queues)


def test_hidden_stragglers_are_looked_for_before_what_is_known_to_be_long():
    """Half of the prompts always take 100 tokens; of the others' samples, which take 10, a few take 1,000. Longest
    first would begin those last of all."""
    rng = np.random.default_rng(0)
    steady, risky = np.full((20, 32), 100.0), np.full((20, 32), 10.0)
    risky[:, -1] = 1000.0
    outcomes = np.full((8, 40, 4), 100)
    outcomes[:, 20:] = np.where(rng.random((8, 20, 4)) < 1 / 32, 1000, 10)
    work = Work.uncertain(np.full(40, 4), np.full(40, 5), outcomes.reshape(8, -1), np.concatenate([steady, risky]))
    placement = place(work, costs=[DecodeCosts(base_s=0.01, per_sequence_s=1e-4)] * 2, slots=4)
    assert all(min(queue[:5]) >= 20 for queue in placement.queues)
    assert placement.makespan_s < 0.9 * placement.fifo_s


def test_expected_tallest_and_excess_follow_from_the_levels():
    levels = np.array([[1.0, 2.0, 3.0, 10.0]])
    work = Work.uncertain(np.array([2]), np.array([5]), np.ones((1, 2), int), levels)
    draws = np.array(list(itertools.product(levels[0], repeat=2)))
    assert work.expected == pytest.approx([draws.sum(axis=1).mean()])
    assert work.tallest == pytest.approx([draws.max(axis=1).mean()])
    beyond = np.maximum(draws - np.quantile(levels, 0.8), 0)
    assert work.excess == pytest.approx([beyond.sum(axis=1).mean()])
