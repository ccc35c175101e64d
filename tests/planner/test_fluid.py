"""The fluid simulation of pipelines that share workers, beside one that takes quantum after quantum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.costs.interference import Interference, model_of
from longtail.planner.cells import Cells
from longtail.planner.fluid import WORTH
from longtail.planner.outlook import Begin, Choice, Outlook
from longtail.planner.solo import RUNS, Sequences, Steps, solo
from longtail.planner.state import PipelineState, Stage
from planner.clusters import cluster, costs, long_tailed, pipeline, shape
from planner.quanta import Job, Quanta

WORKERS = 2


def outlook(*pipelines: PipelineState, workers: int = WORKERS, **more: Interference) -> Outlook:
    return Outlook(cluster(workers, *pipelines, **more), merges=True)


def everywhere(look: Outlook, *, merged: bool = False) -> Choice:
    n = len(look.prospects)
    return Choice((Begin(0, look.cells.count, merged),) * n, (0,) * n, tuple(look.priorities.tolist()))


def apart(look: Outlook) -> Choice:
    n = len(look.prospects)
    return Choice(tuple(Begin(i, 1, False) for i in range(n)), (0,) * n, (1.0,) * n)


def jobs(look: Outlook, choice: Choice, *, micros: int = 40) -> list[Job]:
    """The same pipelines, in quanta."""
    found = []
    for prospect, begin, weight in zip(look.prospects, choice.begins, choice.weights, strict=True):
        own = prospect.typical.draft.on(begin.cells)
        bounds = np.concatenate(
            [
                np.zeros(begin.first, np.int64),
                own.bounds,
                np.full(look.cells.count - begin.first - begin.cells, own.bounds[-1]),
            ]
        )
        work = prospect.work(begin)
        found.append(
            Job(
                costs=prospect.state.costs,
                sequences=Sequences(own.left, own.context, own.admit_s, bounds),
                score_s=work.score_s,
                micro_s=work.train_s / micros,
                micros=micros,
                update_s=work.update_s,
                weight=weight,
            )
        )
    return found


def without_prompts(
    name: str, *, seed: int, n: int = 16, train_token_s: float = 1e-3, priority: float = 1.0
) -> PipelineState:
    table = costs(train_token_s=train_token_s, prefill_s=1e-9)
    lengths = long_tailed(n, most=256, seed=seed)
    return pipeline(name, shape(lengths, group=2), table=table, may_widen=False, priority=priority)


@pytest.mark.parametrize("where", [everywhere, apart])
@pytest.mark.parametrize(("first", "second"), [(16, 16), (24, 8)])
def test_it_comes_as_far_as_quanta_do(where, first: int, second: int) -> None:
    look = outlook(without_prompts("a", seed=1, n=first), without_prompts("b", seed=2, n=second))
    choice = where(look)
    flow = look.flow(choice)
    quanta = Quanta(WORKERS, jobs(look, choice))
    quanta.run(5 * look.horizon_s)
    for i, job in enumerate(quanta.jobs):
        alone_s = look.prospects[i].alone.total_s
        rate = alone_s / float(np.mean(job.steps))
        assert flow.done[i] / flow.seconds == pytest.approx(rate, rel=0.08)


def test_weights_share_time_as_quanta_do() -> None:
    look = outlook(without_prompts("a", seed=1, priority=3.0), without_prompts("b", seed=2))
    choice = everywhere(look)
    flow = look.flow(choice)
    quanta = Quanta(WORKERS, jobs(look, choice))
    quanta.run(5 * look.horizon_s)
    rates = [look.prospects[i].alone.total_s / float(np.mean(job.steps)) for i, job in enumerate(quanta.jobs)]
    assert flow.done / flow.seconds == pytest.approx(rates, rel=0.15)
    assert rates[0] > 1.3 * rates[1]


def test_alone_it_takes_what_the_step_takes_alone() -> None:
    look = outlook(without_prompts("a", seed=1))
    flow = look.flow(everywhere(look))
    assert flow.done[0] == pytest.approx(flow.seconds, rel=0.01)
    assert flow.slow[0] == pytest.approx(1.0, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 3, 5]),
)
def test_nobody_is_faster_than_alone_and_time_is_shared_in_full(sizes: list[int], seed: int, workers: int) -> None:
    pipelines = [without_prompts(f"p{i}", seed=seed + i, n=8 * n) for i, n in enumerate(sizes)]
    look = outlook(*pipelines, workers=workers)
    choice = everywhere(look)
    flow = look.flow(choice)
    assert (flow.done <= flow.seconds * 1.0001).all()
    # The worker-seconds of all that was done fit into the time that there was.
    work_s = 0.0
    for prospect, begin, done in zip(look.prospects, choice.begins, flow.done, strict=True):
        step = prospect.work(begin)
        each_s = sum(part.work_s(look.cells.sizes) for part in step.parts) + step.train_s + workers * step.update_s
        work_s += max(0.0, done / prospect.alone.total_s - 1.0) * each_s
    assert work_s <= workers * flow.seconds * 1.0001
    assert look.value(choice) > 0.4


def test_a_finished_pipeline_leaves_the_other_alone() -> None:
    a, b = without_prompts("a", seed=1), without_prompts("b", seed=1)
    short = pipeline("a", a.typical, table=a.costs, may_widen=False, steps_left=1)
    look = outlook(short, b)
    flow = look.flow(everywhere(look))
    assert np.isfinite(flow.finished[0])
    assert flow.done[0] == pytest.approx(look.prospects[0].alone.total_s)
    together_s = flow.finished[0]
    alone_s = flow.seconds - together_s
    assert flow.done[1] > alone_s


def test_work_that_disturbs_itself_takes_longer() -> None:
    a, b = without_prompts("a", seed=1), without_prompts("b", seed=2)
    model = model_of(a.costs.key)
    kinds = [(model, k) for k in ("decode_small", "decode_large", "train")]
    same = Interference(same={(x, y): (1.5, 1.5, 1.5) for x in kinds for y in kinds})
    near = Interference(neighbour={(x, y): 1.5 for x in kinds for y in kinds})
    free, on_same, on_near = outlook(a, b), outlook(a, b, interference=same), outlook(a, b, interference=near)
    calm = free.value(everywhere(free))
    assert calm / 1.5 < on_same.value(everywhere(on_same)) < 0.85 * calm
    assert on_near.value(apart(on_near)) < 0.8 * free.value(apart(free))
    # Whose rollouts are on other workers are rarely in turns: only while one of them trains.
    assert on_same.value(apart(on_same)) > on_near.value(apart(on_near))


def test_a_stale_pipeline_rolls_out_while_it_trains() -> None:
    table = costs(train_token_s=1e-2, prefill_s=1e-9)
    lengths = shape([250, *[20] * 15], group=2)  # the tail leaves a worker idle
    strict = outlook(pipeline("a", lengths, table=table, may_widen=False))
    stale = outlook(pipeline("a", lengths, table=table, may_widen=False, stale_steps=1))
    ahead = float(stale._about[0, WORTH])
    assert ahead < 0.97 * strict.prospects[0].alone.total_s
    assert ahead > 0.5 * strict.prospects[0].alone.total_s


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_can_be_the_present_one(stage: Stage) -> None:
    a = without_prompts("a", seed=1)
    state = pipeline(
        "a", a.typical, table=a.costs, may_widen=False, stage=stage, train_left=a.typical.train_tokens // 2
    )
    look = outlook(state, without_prompts("b", seed=2))
    flow = look.flow(everywhere(look))
    assert (flow.done > 0).all()


def test_it_takes_no_longer_with_a_thousand_workers() -> None:
    assert Cells.over(1024, 32).count == 4
    assert Cells.over(2, 32).count == 2
    cells = Cells.over(20, 2)
    assert cells.count == 16
    assert cells.sizes.sum() == 20
    assert cells.range_of(cells.members(3, 5)) == (3, 5)
    assert cells.range_of((0, 2)) is None
    assert cells.range_of(()) is None


def test_solo_seconds_are_the_sum_of_the_steps_between_ends() -> None:
    table = costs(prefill_s=1e-3)
    steps = Steps.of(table, 8, 1)
    left, context = np.array([5, 3, 2]), np.array([10, 20, 30])
    running = Sequences(left, context, np.full(3, RUNS), np.array([0, 3]))
    expected = 0.0
    for step in range(5):
        alive = left > step
        expected += table.decode_s(1, int(alive.sum()), float((context[alive] + step).sum()))
    out = solo(running, steps, 8)
    assert out.seconds[0] == pytest.approx(expected)
    assert out.end_s.argsort().tolist() == [2, 1, 0]
    # One slot: one after the other; prompts are computed, and draw the first token.
    waiting = Sequences(left, context, context * 1e-3, np.array([0, 3]))
    one = solo(waiting, steps, 1)
    expected = float(context.sum()) * 1e-3
    for tokens, held in zip(left, context, strict=True):
        expected += sum(table.decode_s(1, 1, float(held + 1 + step)) for step in range(tokens - 1))
    assert one.seconds[0] == pytest.approx(expected)
    # What is left in between.
    half = solo(running, steps, 8, np.array([out.end_s[1]]))
    assert half.rest.tolist() == [[2, 0, 0]]
