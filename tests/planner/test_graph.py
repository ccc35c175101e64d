"""The sub-stage graph, and what steps take alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.costs.table import CostTable
from longtail.planner.alone import alone, alone_rollout_s, alone_s, bound_s
from longtail.planner.cells import Cells, Draft
from longtail.planner.graph import Kind, graph, step_work
from longtail.planner.order import Work
from longtail.planner.outlook import Begin, Outlook
from longtail.planner.solo import Steps
from longtail.planner.start import start_layout
from longtail.planner.state import StepShape
from longtail.planner.widen import Auto
from planner.clusters import NOBODY, cluster, costs, live, long_tailed, pipeline, shape

SLOTS = 256


def look(step: StepShape, *, workers: int = 2, **more: bool) -> Outlook:
    return Outlook(cluster(workers, pipeline("a", step, **more)), merges=True)


def test_a_step_is_prompts_then_samples_then_scores_then_training_then_an_update() -> None:
    found = look(shape(long_tailed(32))).graph(0, Begin(0, 2, False), steps=2)
    kinds = [(node.step, node.kind, node.cell) for node in found.nodes if node.step == 0]
    assert kinds[0] == (0, Kind.PREFILL, 0)
    assert [k for _, k, cell in kinds if cell is None] == [Kind.WAIT, Kind.TRAIN, Kind.UPDATE]
    update = next(i for i, node in enumerate(found.nodes) if node.kind == Kind.UPDATE)
    second = [node for node in found.nodes if node.step == 1 and node.kind == Kind.PREFILL]
    assert len(second) == 2
    assert all(update in node.after for node in second)
    assert all(i < j for j, node in enumerate(found.nodes) for i in node.after)


def test_a_stale_rollout_waits_for_an_earlier_update_and_for_the_rollout_before_it() -> None:
    shared = look(shape(long_tailed(32)))
    works = [shared.prospects[0].work(Begin(0, 2, False))] * 3
    strict, stale = (graph("a", works, shared.cells.sizes, stale=k) for k in (0, 1))
    updates = [i for i, node in enumerate(stale.nodes) if node.kind == Kind.UPDATE]
    for step in (1, 2):
        for node in stale.nodes:
            if node.step == step and node.kind == Kind.PREFILL:
                assert updates[step - 1] not in node.after
                assert (updates[0] in node.after) == (step == 2)
                assert any(stale.nodes[i].step == step - 1 for i in node.after)
    assert stale.critical_s < strict.critical_s


def test_a_merged_tail_is_a_second_part_that_waits_for_the_first() -> None:
    shared = look(shape(long_tailed(64)), workers=8)
    parts = shared.prospects[0].typical.parts(8, True)
    assert len(parts) == 2
    found = graph("a", [shared.prospects[0].work(Begin(0, 8, True))], shared.cells.sizes)
    merged = [node for node in found.nodes if node.cell is not None and len(node.after) > 1]
    assert len(merged) == 1
    assert any("decode_small" in line for line in found.describe())
    assert "worker-s" in found.describe()[-1]


def test_the_log_probabilities_of_a_reference_come_before_training() -> None:
    step = shape(long_tailed(16))
    referenced = StepShape(**{**vars(step), "reference_tokens": 1000})
    table = costs()
    kinds = [node.kind for node in graph("a", [step_work(referenced, table, ())], np.ones(2)).nodes]
    assert kinds == [Kind.WAIT, Kind.LOGPROB, Kind.TRAIN, Kind.UPDATE]
    extra_s = 1000 * table.prefill[1].token_s / 2
    assert _alone(referenced, table) - _alone(step, table) == pytest.approx(extra_s)


def test_nodes_have_the_seconds_of_the_parts() -> None:
    shared = look(shape(long_tailed(32)))
    begin = Begin(0, 2, True)
    found, work = shared.graph(0, begin, steps=1), shared.prospects[0].work(begin)
    decoded_s = sum(node.seconds for node in found.nodes if node.cell is not None)
    assert decoded_s == pytest.approx(sum(part.work_s(shared.cells.sizes) for part in work.parts))


@pytest.mark.parametrize(("workers", "n"), [(2, 16), (2, 64), (4, 64), (8, 128)])
def test_alone_is_about_what_the_planner_of_layouts_predicts(workers: int, n: int) -> None:
    table, step = costs(), shape(long_tailed(n, seed=n))
    samples = np.full(n // 8, 8, np.int64)
    start = start_layout(
        Work.known(samples, np.full(n // 8, 50), step.lengths), workers, {1: SLOTS, 2: SLOTS}, table, Auto()
    )
    found = alone(step, table, workers=workers, slots=SLOTS, widen=True)
    assert found.rollout_s == pytest.approx(min(start.predicted_s.values()), rel=0.1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 120), st.sampled_from([1, 2, 3, 5, 16, 40]), st.integers(0, 1000))
def test_a_step_alone_is_never_below_the_bound(n: int, workers: int, seed: int) -> None:
    table, step = costs(), shape(long_tailed(n, seed=seed))
    bound = bound_s([(step, table, SLOTS)], workers)
    narrow, wide = (alone_s(step, table, workers=workers, slots=SLOTS, widen=w) for w in (False, True))
    assert 0 < bound <= narrow * (1 + 1e-9)
    if workers <= 16:
        assert bound <= wide * (1 + 1e-9)
    assert bound_s([(step, table, SLOTS)] * 3, workers) == pytest.approx(3 * bound)


def test_the_bound_decodes_a_step_together() -> None:
    table = costs(train_token_s=1e-3)
    step = shape([11] * 8, prompt=10)
    decoded_s = sum(table.decode_s(1, 8, 8 * (10 + 1 + i)) for i in range(10))
    rest_s = 10 * table.prefill[1].token_s + step.train_tokens * 1e-3
    assert bound_s([(step, table, SLOTS)], 1) == pytest.approx(decoded_s + rest_s + step.update_s)
    halves = sum(2 * table.decode_s(1, 4, 4 * (10 + 1 + i)) for i in range(10))
    assert bound_s([(step, table, 4)], 1) == pytest.approx(halves + rest_s + step.update_s)


def test_widening_helps_alone_and_what_has_been_sampled_does_not_come_again() -> None:
    table, step = costs(), shape(long_tailed(32))
    narrow, wide = (alone(step, table, workers=2, slots=SLOTS, widen=w) for w in (False, True))
    assert wide.rollout_s < narrow.rollout_s
    assert wide.train_s == narrow.train_s
    steps = Steps.of(table, 32, 2)
    few, many = live([0, 1], [10, 10]), live([0, 1], [500, 500])
    rests = [alone_rollout_s(x, table, steps, workers=2, slots=SLOTS, widen=True) for x in (NOBODY, few, many)]
    assert rests[0] == 0.0
    assert 0 < rests[1] < rests[2] < wide.rollout_s


def test_a_step_without_samples_takes_no_rollout() -> None:
    step = shape([])
    assert alone(step, costs(), workers=4, slots=8, widen=True).rollout_s == 0.0
    assert bound_s([(step, costs(), 8)], 2) == pytest.approx(step.update_s)


def test_a_thinned_step_keeps_its_longest_sample_and_its_batches() -> None:
    step, table = shape(long_tailed(2048, seed=5)), costs()
    thin = Draft.of(step, table, Cells(256, 8))
    assert thin.left.max() == step.lengths.max()
    assert len(thin.left) == pytest.approx(2048 * 8 / 256, rel=0.15)
    on = thin.on(8)
    assert np.diff(on.bounds).sum() == len(thin.left)
    assert sorted(on.left.tolist()) == sorted(thin.left.tolist())


def test_prompts_are_split_only_where_there_are_fewer_than_workers() -> None:
    whole = Draft.of(shape(long_tailed(32), group=8), costs(), Cells(4, 4))
    split = Draft.of(shape(long_tailed(32), group=8), costs(), Cells(8, 8))
    assert np.diff(whole.first).tolist() == [8] * 4
    assert np.diff(split.first).tolist() == [4] * 8


def _alone(step: StepShape, table: CostTable) -> float:
    return alone_s(step, table, workers=2, slots=SLOTS, widen=False)
