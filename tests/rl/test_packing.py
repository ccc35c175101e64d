import heapq
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dense_training import random_groups, tiny_config
from longtail.core.types import TrainGroup, TrainSample
from longtail.rl.packing import LEAST_TOKENS, PIECES, MicroBatch, plan_micro_batches, with_signal


def group(number: int, prompt: int, lengths: list[int]) -> TrainGroup:
    """Advantages name the samples, so that a plan shows where each went."""
    samples = tuple(
        TrainSample(tokens=np.zeros(n, np.int32), logprobs=np.zeros(n, np.float32), advantage=number * 1000 + i)
        for i, n in enumerate(lengths)
    )
    return TrainGroup(prompt=np.full(prompt, number, np.int32), samples=samples)


def names(batch: MicroBatch) -> list[float]:
    return [s.advantage for g in batch.groups for s in g.samples]


def dealt(plan: list[MicroBatch], speeds: list[float]) -> tuple[float, list[list[MicroBatch]]]:
    """When the last worker ends, and what each got, if whoever is free takes the next."""
    free = [(0.0, worker) for worker in range(len(speeds))]
    got: list[list[MicroBatch]] = [[] for _ in speeds]
    for batch in plan:
        at, worker = heapq.heappop(free)
        got[worker].append(batch)
        heapq.heappush(free, (at + batch.cost / speeds[worker], worker))
    return max(at for at, _ in free), got


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 90), max_size=9)), max_size=12)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(1, 700))
def test_every_sample_is_in_exactly_one_micro_batch_within_the_budget(shapes, workers, micro_tokens):
    groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    plan = plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens)
    wanted = Counter(s.advantage for g in groups for s in g.samples if len(s.tokens))
    assert Counter(name for batch in plan for name in names(batch)) == wanted
    for batch in plan:
        assert batch.samples > 0
        assert batch.tokens <= micro_tokens or batch.samples == 1
        for part in batch.groups:
            assert all(int(s.advantage) // 1000 == part.prompt[0] for s in part.samples)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(1, 700))
def test_the_plan_is_a_function_of_its_arguments(shapes, workers, micro_tokens):
    def plan():
        groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
        return [names(b) for b in plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens)]

    assert plan() == plan()


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(1, 700))
def test_the_costliest_come_first(shapes, workers, micro_tokens):
    groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    costs = [batch.cost for batch in plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens)]
    assert costs == sorted(costs, reverse=True)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(300, 700))
def test_a_step_is_not_cut_into_small_ones_beyond_one_for_each_worker(shapes, workers, micro_tokens):
    groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    tokens = sorted(b.tokens for b in plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens))
    small = [n for n in tokens if n < LEAST_TOKENS]
    evenly = -(-sum(g.tokens for g in groups if any(len(s.tokens) for s in g.samples)) // workers)
    if len(small) > 1 and tokens[0] + tokens[1] <= micro_tokens:
        assert evenly <= tokens[0] + tokens[1]  # they fill what one worker gets


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_large_step_gives_each_worker_several_to_take(workers):
    groups = random_groups(tiny_config(), [[100, 200, 300, 400]] * 4 * workers, prompts=[50] * 4 * workers)
    plan = plan_micro_batches(groups, workers=workers, micro_tokens=4096)
    assert 3 * workers <= len(plan) <= 2 * PIECES * workers
    assert sum(b.tokens for b in plan) <= 1.1 * sum(g.tokens for g in groups)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_last_ones_are_small_so_that_nobody_waits_long_for_the_end(workers):
    groups = random_groups(tiny_config(), [[20, 30, 60, 90]] * 16 * workers, prompts=[20] * 16 * workers)
    plan = plan_micro_batches(groups, workers=workers, micro_tokens=4096)
    tokens = [b.tokens for b in plan]
    assert max(tokens[-workers:]) <= tokens[0] / 3
    assert sum(tokens) <= 1.02 * sum(g.tokens for g in groups)
    end, _ = dealt(plan, [1.0] * workers)
    even = [b.cost for b in plan_micro_batches(groups, workers=workers, micro_tokens=max(tokens))]
    assert end <= sum(even) / workers + max(b.cost for b in plan[-workers:])


def test_a_slow_worker_takes_fewer_and_holds_nobody_up():
    groups = random_groups(tiny_config(), [[100, 200, 300, 400]] * 12, prompts=[50] * 12)
    plan = plan_micro_batches(groups, workers=3, micro_tokens=4096)
    speeds = [1.0, 1.0, 0.3]
    end, got = dealt(plan, speeds)
    assert end <= 1.3 * sum(b.cost for b in plan) / sum(speeds)
    assert len(got[2]) < len(got[0])


def test_one_worker_gets_as_few_as_the_budget_allows():
    groups = random_groups(tiny_config(), [[100, 200, 300, 400]] * 8, prompts=[50] * 8)
    plan = plan_micro_batches(groups, workers=1, micro_tokens=4096)
    assert [b.tokens for b in plan] == [3 * 1050, 3 * 1050, 2 * 1050]


def test_one_prompt_on_four_workers_gives_each_some_samples():
    plan = plan_micro_batches([group(0, 4, [50] * 8)], workers=4, micro_tokens=4096)
    assert [b.samples for b in plan] == [2, 2, 2, 2]


def test_one_sample_on_four_workers_is_one_micro_batch():
    assert [b.samples for b in plan_micro_batches([group(0, 4, [50])], workers=4, micro_tokens=4096)] == [1]


def test_seven_prompts_of_four_on_three_workers_are_balanced():
    groups = random_groups(tiny_config(), [[20, 30, 40, 50]] * 7, prompts=[10] * 7)
    plan = plan_micro_batches(groups, workers=3, micro_tokens=10_000)
    _, got = dealt(plan, [1.0] * 3)
    assert sum(b.samples for b in plan) == 28
    assert max(sum(b.tokens for b in batches) for batches in got) <= 3 * groups[0].tokens


def test_a_sequence_larger_than_the_budget_gets_a_micro_batch_of_its_own():
    plan = plan_micro_batches([group(0, 4, [3, 100, 3])], workers=1, micro_tokens=32)
    assert [(b.tokens, b.samples) for b in plan] == [(104, 1), (10, 2)]


def test_few_micro_batches_hold_many_small_groups():
    plan = plan_micro_batches([group(i, 5, [5]) for i in range(40)], workers=1, micro_tokens=100)
    assert [b.tokens for b in plan] == [100, 100, 100, 100]


def test_no_groups_give_no_work():
    assert plan_micro_batches([], workers=3, micro_tokens=64) == []
    assert plan_micro_batches([group(0, 4, [0, 0])], workers=3, micro_tokens=64) == []


def test_a_long_prompt_is_not_repeated_only_to_even_out_a_small_difference():
    plan = plan_micro_batches([group(0, 2000, [50] * 8), group(1, 2000, [40] * 8)], workers=2, micro_tokens=10_000)
    assert [b.samples for b in plan] == [8, 8]


@pytest.mark.parametrize(("workers", "micro_tokens"), [(0, 64), (2, 0)])
def test_a_plan_for_nobody_or_nothing_is_refused(workers, micro_tokens):
    with pytest.raises(ValueError, match="must be positive"):
        plan_micro_batches([group(0, 4, [50])], workers=workers, micro_tokens=micro_tokens)


def test_only_groups_with_an_advantage_have_signal():
    flat = TrainGroup(
        prompt=np.zeros(2, np.int32),
        samples=tuple(
            TrainSample(tokens=np.zeros(3, np.int32), logprobs=np.zeros(3, np.float32), advantage=0.0) for _ in range(3)
        ),
    )
    useful = group(1, 2, [3, 4])
    kept = with_signal([flat, useful])
    assert len(kept) == 1
    assert kept[0] is useful
