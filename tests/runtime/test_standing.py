"""How a pipeline says that it stands, at every stage of its steps."""

from __future__ import annotations

import numpy as np
import pytest

from longtail.core.events import SequenceEnded, StageEntered
from longtail.costs.table import TableKey
from longtail.planner.state import PipelineState, Stage
from simulated_run import COSTS, WIDE, pipeline, simulate

LENGTHS = np.random.default_rng(1).integers(5, 150, (16, 4)).tolist()
TABLE = WIDE.table(TableKey("simulated", "none", "float32", "simulated", 1), measured="", degrees=(2, 4), fine=False)


def states(tmp_path, *, kind=StageEntered, table=TABLE, **changes):
    """(event, state at that moment) of all stages of a run."""
    found: list[tuple[object, PipelineState | None]] = []

    def on_event(event, cluster, controller):
        if isinstance(event, kind):
            found.append((event, controller.drivers["a"].state(cluster.clock.time())))

    job = pipeline(**changes)
    run = simulate({"a": job}, LENGTHS, tmp_path, costs=lambda *_: COSTS, table=table, on_event=on_event)
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


def test_without_costs_there_is_no_comparison(tmp_path):
    run, _ = states(tmp_path, table=None, rollout__tp=1)
    assert not any({"alone_s", "slowdown"} & metrics.keys() for metrics in run.record.steps("a").values())
