"""How pipelines share the workers, as the planner says it: in the terminal, in plain lines, in TensorBoard."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from longtail.core.events import MoveMade, PipelineEnded, PipelineStarted, RunEnded, RunStarted, Span, StepEnded
from longtail.observe.live import RunView
from longtail.observe.plain import PLANS_EVERY_S, PlainSink
from longtail.observe.plans import PlanSummary, PlanTotals, account, describe
from longtail.observe.tensorboard import WORKERS_EVERY_S, WORKERS_RUN, TensorBoardSink
from longtail.observe.terminal import PIPELINE_LINES, draw
from synthetic_run import SHARED_RATES, planned, two_pipelines


def started(pipelines=("a", "b"), t=0.0):
    begun = [
        PipelineStarted(t=t, pipeline=name, step=0, steps=9, model="m", task="t", parameters=1) for name in pipelines
    ]
    return [RunStarted(t=t, run="r", version="0", workers=2, devices=["cpu"] * 2, pipelines=list(pipelines)), *begun]


def ended(name, t=1.0):
    return PipelineEnded(t=t, pipeline=name, step=9, reason="finished")


def screen(view, width=100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(draw(view, width, view.now))
    return console.export_text().splitlines()


def plain(events) -> list[str]:
    stream = io.StringIO()
    sink = PlainSink(stream)
    for event in events:
        sink.write(event)
    sink.close()
    return [line[10:] for line in stream.getvalue().splitlines()]


def test_a_plan_is_described_on_one_line():
    assert describe(planned(0, "share", {"a": 0.75, "b": 0.5})) == (
        "side by side 1.25x of turns (a 0.75, b 0.50): both make progress"
    )
    assert describe(planned(0, "hold", {"a": 0.5, "b": 0.5})) == "in turns: sharing would lose"
    assert describe(planned(0, "share", {}, reason="greedy")) == "side by side: greedy"
    assert describe(planned(0, "hold", {}, reason="in turns by step, as you wish")) == "in turns by step, as you wish"
    assert describe(planned(0, "share", SHARED_RATES, reason="side by side, 1.2 times")) == "side by side, 1.2 times"
    many = describe(planned(0, "share", {f"p{i}": 0.25 for i in range(9)}))
    assert many.startswith("side by side 2.25x of turns (p0 0.25, ")
    assert "p5 0.25, ...)" in many
    assert (
        describe(planned(0, "share", {"a": 1.0}, reason="x\x1b[31m\ny")) == "side by side 1.00x of turns (a 1.00): x y"
    )


def test_the_display_shows_the_plan_while_there_is_something_to_share():
    view = RunView.of([*started(), planned(0.5, "share", {"a": 0.75, "b": 0.5})])
    assert screen(view)[-1] == "plan    side by side 1.25x of turns (a 0.75, b 0.50): both make progress"
    view.apply(planned(0.6, "hold", {"a": 0.5, "b": 0.5}))
    assert screen(view)[-1] == "plan    in turns: sharing would lose"
    view.apply(ended("a"))
    assert not any(line.startswith("plan") for line in screen(view))
    view.apply(RunEnded(t=2.0, reason="finished"))
    assert not any(line.startswith("plan") for line in screen(view))


def test_a_started_run_forgets_the_plan_of_the_one_before():
    view = RunView.of([*started(), planned(0.5, "share", {"a": 0.75, "b": 0.5}), *started(t=50.0)])
    assert view.plan is None


@pytest.mark.parametrize("width", [40, 80])
def test_the_plan_fits_the_width(width):
    view = RunView()
    for event in two_pipelines():
        view.apply(event)
        assert max(map(len, screen(view, width))) <= width


def test_a_run_through_which_many_pipelines_pass_shows_those_that_live():
    names = [f"p{i}" for i in range(40)]
    view = RunView.of([*started(names), *(ended(name) for name in names[:-2])])
    lines = screen(view)
    shown = [line.split()[0] for line in lines if line.startswith("p") and " step " in line]
    assert len(shown) == PIPELINE_LINES
    assert shown[-2:] == names[-2:]
    assert f"and {40 - PIPELINE_LINES} more that are over" in lines
    all_live = screen(RunView.of(started(names)))
    assert sum(" step " in line for line in all_live) == 40


def test_plain_lines_tell_a_plan_when_it_changes_and_never_often():
    told = [planned(20.0 * k, "share", {"a": 0.75, "b": 0.5 + 0.01 * k}) for k in range(5)]
    lines = [line for line in plain([*started(), *told]) if "turns" in line]
    assert lines == ["side by side 1.25x of turns (a 0.75, b 0.50): both make progress"]
    changed = [*told, planned(100.0, "hold", SHARED_RATES), planned(120.0, "share", {"a": 0.5, "c": 0.75})]
    lines = [line for line in plain([*started(), *changed]) if "turns" in line]
    assert lines[1:] == [
        "in turns: sharing would lose",
        "side by side 1.25x of turns (a 0.50, c 0.75): both make progress",
    ]
    flips = [planned(0.1 * k, ("share", "hold")[k % 2], SHARED_RATES) for k in range(1000)]
    lines = [line for line in plain([*started(), *flips]) if "turns" in line]
    assert 2 <= len(lines) <= 100 / PLANS_EVERY_S + 1


def test_a_name_that_comes_again_has_its_first_step_told_again():
    def life(t):
        done = StepEnded(t=t + 0.1, pipeline="a", step=0, metrics={"reward_mean": 0.5})
        return [
            *started(["a"], t)[1:],
            done,
            StepEnded(t=t + 0.2, pipeline="a", step=1, metrics={}),
            ended("a", t + 0.3),
        ]

    lines = plain([*started([]), *life(0.0), *life(0.4)])
    assert sum("a step 1/9" in line for line in lines) == 2


def test_what_was_planned_is_a_curve_beside_the_workers(tmp_path):
    def at(t):
        return Span(
            t=t, worker=0, pipeline="a", substage="decode", step=0, start=t - 1, end=t, busy_s=1.0, quanta=1, tokens=1,
            batch=1.0,
        )  # fmt: skip

    first = [
        planned(1.0, "share", {"a": 0.75, "b": 0.5}),
        planned(2.0, "hold", {"a": 0.5, "b": 0.25}, duration_s=0.002),
    ]
    sink = TensorBoardSink(tmp_path)
    for event in [*started(), *first, at(WORKERS_EVERY_S), at(2 * WORKERS_EVERY_S)]:
        sink.write(event)
    sink.close()
    curves = EventAccumulator(str(tmp_path / WORKERS_RUN), size_guidance={"scalars": 0})
    curves.Reload()
    assert [p.value for p in curves.Scalars("planner/ms")] == [pytest.approx(3.0)]
    assert [p.value for p in curves.Scalars("planner/in_turns")] == [pytest.approx(0.5)]
    assert [p.value for p in curves.Scalars("planner/predicted_rate")] == [pytest.approx(1.0)]
    assert len(curves.Scalars("w0/utilisation")) == 2


def test_moves_without_an_outcome_are_curves_too_and_those_of_void_steps_are_not(tmp_path):
    def place(t, step):
        return MoveMade(
            t=t, pipeline="a", step=step, move="place", workers=[1], reason="r", predicted_gain_s=0.5,
            predicted_cost_s=0.1,
        )  # fmt: skip

    again = started(["a"], 5.0)[1]
    done = StepEnded(t=6.0, pipeline="a", step=0, metrics={"loss": 1.0})
    sink = TensorBoardSink(tmp_path)
    for event in [*started(["a"]), place(1.0, 0), again, place(5.5, 0), done]:
        sink.write(event)
    sink.close()
    curves = EventAccumulator(str(tmp_path / "a"), size_guidance={"scalars": 0})
    curves.Reload()
    assert {tag for tag in curves.Tags()["scalars"] if "/" in tag} == {"place/count", "place/predicted_net_gain_s"}
    assert [p.value for p in curves.Scalars("place/count")] == [1.0]
    assert [p.value for p in curves.Scalars("place/predicted_net_gain_s")] == [pytest.approx(0.4)]


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=50))
def test_the_median_planning_time_is_right_within_one_percent(times):
    totals = PlanTotals()
    for duration_s in times:
        totals.planned(planned(0.0, "share", SHARED_RATES, duration_s=duration_s))
    summary = totals.summary()
    lower = sorted(times)[(len(times) - 1) // 2]
    assert summary.median_s == pytest.approx(lower, rel=0.0101)
    assert summary.most_s == max(times)
    assert (summary.in_turns, summary.predicted) == (None, None)


def test_what_was_foretold_of_less_than_half_the_time_is_no_prediction_of_the_whole():
    totals = PlanTotals()
    totals.planned(planned(0.0, "share", {}))
    totals.passed(6.0, pipelines=2)
    totals.planned(planned(6.0, "share", {"a": 0.75, "b": 0.5}))
    totals.passed(5.0, pipelines=2)
    assert totals.summary().predicted is None
    totals.passed(1.0, pipelines=2)
    assert totals.summary().predicted == pytest.approx(1.25)
    totals.passed(3.0, pipelines=1)
    assert totals.summary().predicted == pytest.approx((6 * 1.25 + 3) / 9)


def test_planning_that_takes_no_time_at_all_is_accounted_for():
    totals = PlanTotals()
    totals.planned(planned(0.0, "share", {}, duration_s=0.0))
    assert totals.summary().median_s == 0.0
    known = PlanSummary(told=3, in_turns=0.125, predicted=1.2, median_s=0.0031, most_s=0.04)
    assert account(known) == "in turns for 12 % of the time, planning took 3.1 ms (at most 0.04 s)"
