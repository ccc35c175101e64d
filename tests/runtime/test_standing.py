"""How a pipeline says that it stands, at every stage of its steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from longtail.core.events import SequenceEnded, StageEntered, StepEnded
from longtail.costs.table import TableKey
from longtail.planner import fluid
from longtail.planner.outlook import Outlook
from longtail.planner.state import ClusterState, PipelineState, Stage
from simulated_run import COSTS, WIDE, pipeline, simulate

LENGTHS = np.random.default_rng(1).integers(5, 150, (16, 4)).tolist()
TAIL = [[200] * 4, *([[20] * 4] * 3)]
"""One prompt of each step runs ten times as long as the others."""
TRAINS_LONG = replace(WIDE, per_train_token_s=3e-3, update_s=0.05)


def measured(costs):
    key = TableKey("simulated", "none", "float32", "simulated", 1)
    return costs.table(key, measured="", degrees=(2, 4), fine=False)


TABLE = measured(WIDE)


def states(tmp_path, *, kind=StageEntered, table=TABLE, lengths=LENGTHS, costs=COSTS, workers=2, **changes):
    """(event, state at that moment) of all stages of a run."""
    found: list[tuple[object, PipelineState | None]] = []

    def on_event(event, cluster, controller):
        if isinstance(event, kind):
            found.append((event, controller.drivers["a"].state(cluster.clock.time())))

    job = pipeline(**changes)
    run = simulate(
        {"a": job}, lengths, tmp_path, workers=workers, costs=lambda *_: costs, table=table, on_event=on_event
    )
    return run, found


def test_a_pipeline_of_which_nothing_is_known_says_nothing(tmp_path):
    _, found = states(tmp_path, table=None, rollout__tp=1)
    assert all(state is None for _, state in found)


def test_while_it_loads_and_saves_at_the_end_it_is_away(tmp_path):
    _, found = states(tmp_path)
    away = [state for event, state in found if event.stage in ("load", "checkpoint")]
    assert away == [None] * len(away)


def test_the_present_step_has_its_true_lengths_once_they_are_known_and_the_last_one_is_typical(tmp_path):
    run, found = states(tmp_path, kind=StageEntered, rollout__order="fifo", rollout__tp="oracle")
    sizes = {}
    for event in run.record.events:
        if isinstance(event, SequenceEnded):
            sizes.setdefault(event.step, []).append(event.tokens)
    for event, state in found:
        if event.stage not in ("train", "update"):
            continue
        assert sorted(state.step.lengths) == sorted(sizes[event.step])
        typical = event.step - 1 if event.step else 0
        assert sorted(state.typical.lengths) == sorted(sizes[typical])
        assert state.steps_left == 3 - event.step


def test_what_is_left_to_train_and_to_sample_gets_less_and_comes_to_nothing(tmp_path):
    _, found = states(tmp_path, kind=(StageEntered, SequenceEnded))
    last = {}
    for event, state in found:
        if state is None:
            continue
        assert state.elapsed_s >= 0
        assert len(state.live) <= 32
        assert np.all(state.live.remaining >= 1)
        if event.kind == "stage" and event.stage in ("train", "update"):
            last[event.step, event.stage] = state
            assert len(state.live) == 0
    for step in range(3):
        assert last[step, "train"].step.train_tokens > 0
        assert last[step, "update"].train_left == 0
        assert last[step, "update"].stage == Stage.UPDATE


def test_the_metrics_of_a_step_compare_it_with_the_same_step_alone(tmp_path):
    run, _ = states(tmp_path)
    for metrics in run.record.steps("a").values():
        assert metrics["slowdown"] == pytest.approx(metrics["time_s"] / metrics["alone_s"])
        assert 0.3 < metrics["slowdown"] < 3


def asynchronous(tmp_path, staleness=1, **changes):
    """A pipeline whose training fills the tails of its rollouts."""
    asked = {"steps": 8, "rollout__prompts": 4, "rollout__tp": 1, "train__micro_tokens": 250, "checkpoint__every": 100}
    return states(
        tmp_path, costs=TRAINS_LONG, table=measured(TRAINS_LONG), workers=4, max_staleness=staleness,
        **{"lengths": TAIL, **asked, **changes},
    )  # fmt: skip


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_training_and_the_rollout_that_is_ahead_of_it_are_both_seen_by_the_planner(tmp_path, staleness):
    _, found = asynchronous(tmp_path, staleness, kind=(StageEntered, SequenceEnded))
    stages, both = set(), 0
    for _, state in found:
        if state is None:
            continue
        stages.add((state.stage, len(state.live) > 0))
        if state.stage not in (Stage.TRAIN, Stage.UPDATE):
            assert state.train_left == state.step.train_tokens
        if state.stage is not Stage.TRAIN or not len(state.live):
            continue
        both += 1
        assert 0 < state.train_left < 1.1 * state.step.train_tokens, "of this step, not of two"
        (prospect,) = Outlook(ClusterState(workers=4, pipelines=(state,)), merges=True).prospects
        about = prospect.about()
        assert prospect.rolls
        assert about[fluid.LIVE] == 1.0
        assert about[fluid.TRAIN_NOW] == pytest.approx(state.train_left * 3e-3)
        assert prospect.rest.train_s == pytest.approx(about[fluid.TRAIN_NOW] / 4)
    assert both > 10
    assert {(Stage.ROLLOUT, True), (Stage.TRAIN, True)} <= stages


def test_without_staleness_no_sample_is_live_outside_of_a_rollout(tmp_path):
    _, found = asynchronous(tmp_path, 0, kind=(StageEntered, SequenceEnded))
    assert {state.stage for _, state in found if state is not None and len(state.live)} == {Stage.ROLLOUT}


def test_steps_that_overlap_are_compared_by_the_time_between_their_ends(tmp_path):
    stale, _ = asynchronous(tmp_path / "stale")
    fresh, _ = asynchronous(tmp_path / "fresh", 0)
    ends = [event.t for event in stale.record.events if isinstance(event, StepEnded)]
    overlapped, one_by_one = stale.record.steps("a"), fresh.record.steps("a")
    for step in range(2, 7):
        metrics = overlapped[step]
        assert metrics["slowdown"] == pytest.approx((ends[step] - ends[step - 1]) / metrics["alone_s"])
        assert 0.8 < metrics["slowdown"] < 1.25
        assert metrics["alone_s"] < 0.97 * one_by_one[step]["alone_s"]


def test_a_step_that_is_scored_waits_for_the_training_before_it_and_not_for_its_rewards(tmp_path):
    """Rewards are there at once, and training takes longer than a rollout."""
    run, _ = asynchronous(tmp_path, lengths=[[8] * 4] * 4)
    steps = run.record.steps("a")
    assert all(metrics["score_s"] < 0.01 for metrics in steps.values())
    assert all(steps[k]["wait_s"] > 0.1 for k in range(2, 8))


def test_groups_of_a_fixed_degree_are_compared_with_the_same_groups_alone(tmp_path):
    run, _ = states(tmp_path, costs=WIDE, rollout__tp=2)
    narrow, _ = states(tmp_path / "narrow", costs=WIDE, rollout__tp=1)
    for step, metrics in run.record.steps("a").items():
        assert 0.8 < metrics["slowdown"] < 1.4
        assert metrics["alone_s"] > 1.1 * narrow.record.steps("a")[step]["alone_s"], "a group has the slots of a worker"


def test_of_groups_whose_costs_were_not_measured_there_is_no_comparison(tmp_path):
    run, _ = states(tmp_path, costs=WIDE, table=measured(COSTS), rollout__tp=2)
    assert not any({"alone_s", "slowdown"} & metrics.keys() for metrics in run.record.steps("a").values())


def test_without_costs_there_is_no_comparison(tmp_path):
    run, _ = states(tmp_path, table=None, rollout__tp=1)
    assert not any({"alone_s", "slowdown"} & metrics.keys() for metrics in run.record.steps("a").values())
