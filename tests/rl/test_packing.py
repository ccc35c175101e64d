from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dense_training import random_groups, tiny_config
from longtail.core.types import TrainGroup, TrainSample
from longtail.rl.packing import MicroBatch, estimated_cost, plan_micro_batches, with_signal


def group(number: int, prompt: int, lengths: list[int]) -> TrainGroup:
    """Advantages name the samples, so that a plan shows where each went."""
    samples = tuple(
        TrainSample(tokens=np.zeros(n, np.int32), logprobs=np.zeros(n, np.float32), advantage=number * 1000 + i)
        for i, n in enumerate(lengths)
    )
    return TrainGroup(prompt=np.full(prompt, number, np.int32), samples=samples)


def names(batches: list[MicroBatch]) -> list[float]:
    return [s.advantage for b in batches for g in b.groups for s in g.samples]


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 90), max_size=9)), max_size=12)


@given(SHAPES, st.integers(1, 5), st.integers(1, 200))
def test_every_sample_is_in_exactly_one_micro_batch_within_the_budget(shapes, workers, micro_tokens):
    groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    plan = plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens)
    assert len(plan) == workers
    wanted = Counter(s.advantage for g in groups for s in g.samples if len(s.tokens))
    assert Counter(name for batches in plan for name in names(batches)) == wanted
    for batch in (b for batches in plan for b in batches):
        assert batch.samples > 0
        assert batch.tokens <= micro_tokens or batch.samples == 1
        for part in batch.groups:
            assert all(int(s.advantage) // 1000 == part.prompt[0] for s in part.samples)


@given(SHAPES, st.integers(1, 5), st.integers(1, 200))
def test_the_plan_is_a_function_of_its_arguments(shapes, workers, micro_tokens):
    def plan():
        groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
        return [names(b) for b in plan_micro_batches(groups, workers=workers, micro_tokens=micro_tokens)]

    assert plan() == plan()


@given(SHAPES, st.integers(1, 5))
def test_no_worker_has_more_than_the_even_share_and_one_part(shapes, workers):
    groups = [group(i, p, lengths) for i, (p, lengths) in enumerate(shapes)]
    plan = plan_micro_batches(groups, workers=workers, micro_tokens=10_000)
    loads = [sum(estimated_cost(g) for b in batches for g in b.groups) for batches in plan]
    parts = [estimated_cost(g) for batches in plan for b in batches for g in b.groups]
    assert max(loads) <= sum(loads) / workers + max(parts, default=0.0) + 1e-9


def test_one_prompt_on_four_workers_gives_each_some_samples():
    plan = plan_micro_batches([group(0, 4, [50] * 8)], workers=4, micro_tokens=4096)
    assert [b[0].samples for b in plan if b] == [2, 2, 2, 2]


def test_one_sample_on_four_workers_leaves_three_without_work():
    plan = plan_micro_batches([group(0, 4, [50])], workers=4, micro_tokens=4096)
    assert sorted(len(b) for b in plan) == [0, 0, 0, 1]


def test_seven_prompts_of_four_on_three_workers_are_balanced():
    groups = random_groups(tiny_config(), [[20, 30, 40, 50]] * 7, prompts=[10] * 7)
    plan = plan_micro_batches(groups, workers=3, micro_tokens=10_000)
    tokens = [sum(b.tokens for b in batches) for batches in plan]
    assert sum(b.samples for batches in plan for b in batches) == 28
    assert max(tokens) <= 3 * groups[0].tokens


def test_a_sequence_larger_than_the_budget_gets_a_micro_batch_of_its_own():
    plan = plan_micro_batches([group(0, 4, [3, 100, 3])], workers=1, micro_tokens=32)
    assert sorted((b.tokens, b.samples) for b in plan[0]) == [(10, 2), (104, 1)]


def test_few_micro_batches_hold_many_small_groups():
    plan = plan_micro_batches([group(i, 5, [5]) for i in range(40)], workers=1, micro_tokens=100)
    assert [b.tokens for b in plan[0]] == [100, 100, 100, 100]


def test_no_groups_give_no_work():
    assert plan_micro_batches([], workers=3, micro_tokens=64) == [[], [], []]


def test_a_long_prompt_is_not_repeated_only_to_even_out_a_small_difference():
    plan = plan_micro_batches([group(0, 2000, [50] * 8), group(1, 2000, [40] * 8)], workers=2, micro_tokens=10_000)
    assert [b.samples for batches in plan for b in batches] == [8, 8]


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
