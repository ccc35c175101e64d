"""What sharing brought, from the events alone: the times, the idle time that others filled, the throughput together."""

import io
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from longtail.core.events import (
    MoveEnded,
    MoveMade,
    PipelineEnded,
    PipelineStarted,
    Rollback,
    RunEnded,
    RunStarted,
    Span,
    StageEntered,
    StepEnded,
)
from longtail.observe.filling import REMEMBERED_S, StepTime
from longtail.observe.live import RunView
from longtail.observe.summary import render, summarise
from synthetic_run import ALONE_S, BUSY, STEP_S, planned, two_pipelines


def started(t=0.0, workers=2, pipelines=()):
    return RunStarted(
        t=t, run="r", version="0", workers=workers, devices=["cpu"] * workers, pipelines=list(pipelines)
    )  # fmt: skip


def begins(t, name, *, step=0, steps=100, model="m"):
    return PipelineStarted(t=t, pipeline=name, step=step, steps=steps, model=model, task="t", parameters=1)


def span(start, end, busy_s, pipeline, *, worker=0, step=0):
    return Span(
        t=end, worker=worker, pipeline=pipeline, substage="decode", step=step, start=start, end=end, busy_s=busy_s,
        quanta=1, tokens=1, batch=1.0,
    )  # fmt: skip


def rollout(t, name, step):
    return StageEntered(t=t, pipeline=name, step=step, stage="rollout")


def step(start, end, name, number, *, alone_s=None, reward=0.5):
    """A step from ``start`` to ``end``, counted from 0."""
    metrics = {"reward_mean": reward, "time_s": end - start, "tokens": 10.0}
    metrics |= {} if alone_s is None else {"alone_s": alone_s}
    return [rollout(start, name, number), StepEnded(t=end, pipeline=name, step=number, metrics=metrics)]


def in_time(*events):
    return sorted(events, key=lambda event: event.t)


def words(line: str) -> str:
    return " ".join(line.split())


def printed(events, width=80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(summarise(events)))
    return console.export_text()


def test_the_summary_says_what_steps_would_have_taken_alone_and_what_all_got_together():
    """28 valid steps; sums has 20 of them, back to back, and those of collatz lie within."""
    summary = summarise(two_pipelines())
    assert summary.together == pytest.approx(28 * ALONE_S / (20 * STEP_S))
    for pipeline in summary.pipelines:
        assert pipeline.step_alone_s == pytest.approx(ALONE_S)
        assert pipeline.slowdown == pytest.approx(STEP_S / ALONE_S)
    sums, collatz = summary.pipelines
    assert sums.idle_filled == 0.0  # collatz used no worker
    assert collatz.idle_filled == pytest.approx(BUSY)


def test_the_plans_of_a_run_are_summed_over_the_time_in_which_they_held():
    plans = summarise(two_pipelines()).plans
    assert plans.told == 3
    assert plans.in_turns == pytest.approx(4 / 22)
    assert plans.predicted == pytest.approx((16 * 1.25 + 4 * 0.95 + 2 * 1.25 + 28 * 1.0) / 50)
    assert plans.median_s == pytest.approx(0.004, rel=0.01)
    assert plans.most_s == 0.004


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_a_shared_run_shows_what_users_ask_for(width):
    lines = printed(two_pipelines(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert words(lines[0]) == "pipeline steps reward step alone shared slowdown idle filled tok/s"
    assert words(lines[1]) == "sums 20 0.08 → 0.98 1.6 s 2.0 s 1.25x 0 % 50.0"
    assert words(lines[2]) == "collatz 8/10 0.10 → 0.80 1.6 s 2.0 s 1.25x 75 % 50.0"
    assert lines[3].split() == ["pipeline", "moves", "checkpoint"]
    assert lines[4].split() == ["sums", "widen", "19", "runs/amber-finch/sums/step-20"]
    text = "\n".join(lines)
    assert "together 1.12x the throughput of taking turns (predicted 1.09x)" in lines
    assert "in turns for 18 % of the time, planning took 4.0 ms (at most 4.0 ms)" in lines
    assert "workers busy 75 % (w0 75 %, w1 75 %)   ran 50.0 s in 2 starts" in text


def test_a_run_of_one_pipeline_says_nothing_of_sharing():
    events = [started(), begins(0.0, "p", steps=3)]
    for k in range(3):
        events += step(2.0 * k, 2.0 * k + 2, "p", k, alone_s=1.5)
        events.append(MoveMade(t=2.0 * k + 1, pipeline="p", step=k, move="hold", workers=[0, 1], reason="r"))
        events.append(span(2.0 * k, 2.0 * k + 2, 1.0, "p"))
    summary = summarise(in_time(*events))
    assert (summary.together, summary.plans, summary.shared) == (None, None, False)
    assert summary.pipelines[0].idle_filled is None
    text = printed(in_time(*events))
    assert words(text.splitlines()[0]) == "pipeline steps reward step time tok/s checkpoint"
    for word in ("together", "alone", "hold", "filled", "busy", "planning"):
        assert word not in text
    assert "workers idle 75 %" in text


def test_without_a_word_on_what_one_step_would_have_taken_nothing_is_said_of_the_whole():
    events = [started(), begins(0.0, "a"), begins(0.0, "b")]
    for k in range(4):
        events += step(2.0 * k, 2.0 * k + 2, "a", k, alone_s=1.0)
        events += step(2.0 * k, 2.0 * k + 2, "b", k, alone_s=None if k == 0 else 1.5)
    summary = summarise(in_time(*events))
    assert summary.together is None
    a, b = summary.pipelines
    assert (a.slowdown, b.slowdown) == (pytest.approx(2.0), pytest.approx(2.0 / 1.5))  # of steps of which it is known
    assert "together" not in printed(in_time(*events))


@pytest.mark.parametrize(("busy_s", "said"), [(2.0, True), (0.5, False)])
def test_nothing_is_said_of_the_whole_where_steps_alone_would_take_longer_than_all_their_work(busy_s, said):
    """1.5 s with all workers to itself, for work that took so many seconds of workers: a table of another machine."""
    events = [started(), begins(0.0, "a"), begins(0.0, "b")]
    for k in range(3):
        for name in ("a", "b"):
            events += step(2.0 * k, 2.0 * k + 2, name, k, alone_s=1.5)
            events.append(span(2.0 * k, 2.0 * k + 2, busy_s, name))
    assert (summarise(in_time(*events)).together is not None) is said


def test_tokens_a_second_of_steps_that_overlap_are_over_the_time_in_which_they_lasted():
    """An asynchronous pipeline: each step begins half-way through the one before."""
    one_after_another = [started(), *step(0.0, 2.0, "a", 0), *step(2.0, 4.0, "a", 1)]
    overlapping = [started(), *step(0.0, 2.0, "a", 0), *step(1.0, 3.0, "a", 1)]
    apart, over = (summarise(in_time(*events)).pipelines[0] for events in (one_after_another, overlapping))
    assert over.tokens_per_s == pytest.approx(apart.tokens_per_s * 4 / 3)


def test_columns_are_there_only_where_something_is_known():
    events = [started(), *step(0.0, 2.0, "a", 0), *step(0.0, 2.0, "b", 0)]
    header = printed(in_time(*events)).splitlines()[0]
    assert words(header) == "pipeline steps reward step time idle filled tok/s"
    known = [started(), *step(0.0, 2.0, "a", 0, alone_s=1.0), *step(0.0, 2.0, "b", 0)]
    row = printed(in_time(*known)).splitlines()[2]
    assert words(row) == "b 1 0.50 → 0.50 - 2.0 s - 0 % 5.00"


def test_moves_of_all_kinds_are_counted_in_their_order_and_what_they_brought_is_said():
    events = [started(), begins(0.0, "a"), begins(0.0, "b")]
    for k in range(3):
        events += step(4.0 * k, 4.0 * k + 4, "a", k) + step(4.0 * k, 4.0 * k + 4, "b", k)
        where = {"pipeline": "a", "step": k, "workers": [0, 1]}
        events.append(
            MoveMade(
                t=4.0 * k + 1, move="merge", reason="r", predicted_gain_s=1.0, predicted_cost_s=0.1, **where
            )
        )  # fmt: skip
        refused = "no room" if k == 2 else None
        events.append(
            MoveEnded(
                t=4.0 * k + 3.9, move="merge", cost_s=0.2, moved_bytes=9, recomputed_tokens=0, refused=refused, **where
            )
        )
        events.append(
            MoveMade(t=4.0 * k, pipeline="b", step=k, move="place", workers=[1], reason="r", predicted_gain_s=0.5)
        )
        events.append(MoveMade(t=4.0 * k + 3, pipeline="b", step=k, move="hold", workers=[0, 1], reason="r"))
    a, b = summarise(in_time(*events)).pipelines
    assert {kind: total.count for kind, total in a.moves.items()} == {"merge": 2}
    assert {kind: total.count for kind, total in b.moves.items()} == {"place": 3, "hold": 3}
    lines = [words(line) for line in printed(in_time(*events)).splitlines()]
    assert "a merge 2 -" in lines
    assert "b place 3, hold 3 -" in lines
    assert "place: predicted +1.5 s net" in lines
    assert "merge: predicted +1.8 s net, cost 0.40 s (predicted 0.20 s), 1 refused" in lines
    assert not any(line.startswith("hold:") for line in lines)


durations = st.floats(0.1, 5.0)


@given(st.lists(st.lists(durations, min_size=1, max_size=6), min_size=2, max_size=3))
def test_pipelines_that_are_not_slowed_have_as_much_throughput_as_overlaps(pipelines):
    """Side by side from one start the time is that of the longest; one after another it is the sum."""
    beside, after, t0 = [], [], 0.0
    for number, times in enumerate(pipelines):
        t = 0.0
        for k, seconds in enumerate(times):
            beside += step(t, t + seconds, f"p{number}", k, alone_s=seconds)
            after += step(t0, t0 + seconds, f"p{number}", k, alone_s=seconds)
            t, t0 = t + seconds, t0 + seconds
    total, longest = sum(map(sum, pipelines)), max(map(sum, pipelines))
    assert summarise([started(), *in_time(*beside)]).together == pytest.approx(total / longest)
    assert summarise([started(), *in_time(*after)]).together == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=5), st.integers(1, 10))
def test_steps_that_became_void_and_gaps_between_starts_count_in_no_figure_of_time(falls, steps):
    """However often both pipelines fall back, by a rollback or by a kill and a start an hour later."""

    def pair(t, k):
        return in_time(*step(t, t + 2, "a", k, alone_s=1.5), *step(t, t + 2, "b", k, alone_s=1.0))

    def start(t, done):
        return [begins(t, "a", step=done), begins(t, "b", step=done)]

    t, done, events = 0.0, 0, [started(), *start(0.0, 0)]
    for length, killed in falls:
        reached = min(steps, done + length)
        back = (done + reached) // 2
        for k in range(done, reached):
            events += pair(t, k)
            t += 2
        if killed:
            t += 3600.0
            events += [started(t, pipelines=["a", "b"]), *start(t, back)]
        else:
            events += [Rollback(t=t, pipeline=name, step=back, reason="r") for name in ("a", "b")]
        done = back
    for k in range(done, steps):
        events += pair(t, k)
        t += 2
    summary = summarise(events)
    assert summary.together == pytest.approx(2.5 / 2)
    assert [p.slowdown for p in summary.pipelines] == [pytest.approx(2 / 1.5), pytest.approx(2.0)]


cells = st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=12, max_size=12)


@given(cells, cells, st.lists(st.integers(1, 12), max_size=3, unique=True), st.integers(0, 3))
def test_idle_filled_is_what_others_used_of_what_was_left_however_late_spans_are_told(own, others, cuts, late):
    """One worker, a grid of seconds: in each both used some part. Steps end at ``cuts``, with a pause of a second."""
    cuts = sorted(cuts)
    bounds = [0, *cuts, 12]
    steps = [(a + (a in cuts), b) for a, b in pairwise(bounds) if a + (a in cuts) < b]
    events = [(float(a), 0, "begin", None) for a, b in steps] + [(float(b), 1, "end", None) for a, b in steps]
    for t in range(12):
        for busy_s, mine in ((own[t], True), (others[t], False)):
            events.append((t + 1.0 + late, 2, "span", (span(float(t), t + 1.0, busy_s, "x"), mine)))
    time = StepTime()
    for t, _, what, used in sorted(events, key=lambda event: event[:2]):
        if what == "begin":
            time.begin(t, 1)
        elif what == "end":
            time.end(t)
        else:
            time.used(used[0], own=used[1])
    inside = [t for a, b in steps for t in range(a, b)]
    left = len(inside) - sum(own[t] for t in inside)
    assert time.worker_s(12.0) == pytest.approx(len(inside))
    assert time.filled(12.0) == pytest.approx(sum(others[t] for t in inside) / left)


def test_a_step_that_is_under_way_counts_up_to_now():
    view = RunView.of([started(workers=2), rollout(0.0, "a", 0), span(0.0, 4.0, 2.0, "a"), span(0.0, 4.0, 3.0, "b")])
    assert view.pipelines["a"].time.filled(view.now) == pytest.approx(3.0 / (2 * 4.0 - 2.0))


def test_a_long_run_remembers_few_steps_and_few_classes_of_planning_times():
    time = StepTime()
    view = RunView.of([started()])
    for k in range(20_000):
        time.begin(0.1 * k, 2)
        time.end(0.1 * k + 0.1)
        view.apply(planned(0.1 * k, "share", {"a": 0.7, "b": 0.6}, duration_s=1e-4 * (1 + k % 100)))
    assert len(time._recent) <= 10 * REMEMBERED_S + 2
    assert len(view.plans._classes) <= 300
    plans = view.plans.summary()
    assert plans.median_s == pytest.approx(50e-4, rel=0.02)
    assert plans.most_s == pytest.approx(100e-4)


# -- pipelines that come and go ---------------------------------------------------------------------------------


def test_a_pipeline_may_start_late_and_another_end_early():
    events = [started(), begins(0.0, "early"), begins(4.0, "late")]
    for k in range(3):
        events += step(2.0 * k, 2.0 * k + 2, "early", k, alone_s=2.0)
    events.append(PipelineEnded(t=6.0, pipeline="early", step=3, reason="interrupted"))
    for k in range(3):
        events += step(4.0 + 2 * k, 6.0 + 2 * k, "late", k, alone_s=1.0)
    events += [span(0.0, 10.0, 5.0, "late"), RunEnded(t=10.0, reason="finished")]
    summary = summarise(in_time(*events))
    early, late = summary.pipelines
    assert (early.status, early.steps, late.steps) == ("interrupted", 3, 3)
    assert summary.together == pytest.approx((3 * 2.0 + 3 * 1.0) / 10.0)
    assert early.idle_filled == pytest.approx(0.6 * 5.0 / (2 * 6.0))
    assert late.idle_filled == 0.0


def test_a_pipeline_that_fails_in_mid_step_leaves_no_step_open():
    events = [started(), begins(0.0, "a"), begins(0.0, "b"), rollout(0.0, "a", 0), *step(0.0, 10.0, "b", 0)]
    events.append(PipelineEnded(t=2.0, pipeline="a", step=0, reason="failed", error="boom"))
    view = RunView.of(in_time(*events))
    assert view.pipelines["a"].under_way == {}
    assert view.pipelines["a"].time.worker_s(10.0) == pytest.approx(2 * 2.0)
    assert (view.pipelines["a"].status, view.pipelines["a"].stage) == ("failed", None)


def test_a_name_that_comes_again_stands_for_the_new_pipeline_and_its_time_for_both():
    events = [started(), begins(0.0, "a", model="old"), *step(0.0, 2.0, "a", 0, alone_s=2.0, reward=9.0)]
    events += [PipelineEnded(t=2.0, pipeline="a", step=1, reason="failed", error="boom")]
    view = RunView.of([*events, begins(5.0, "a", model="new")])
    a = view.pipelines["a"]
    assert (a.status, a.error, a.model, a.step, a.rewards, a.metrics) == ("running", None, "new", 0, [], {})
    view.apply(rollout(5.0, "a", 0))
    assert a.samples_expected is None  # nothing is known of its group size yet
    view.apply(StepEnded(t=8.0, pipeline="a", step=0, metrics={"reward_mean": 1.0, "time_s": 3.0}))
    assert a.rewards == [1.0]
    assert a.time.worker_s(8.0) == pytest.approx(2 * (2.0 + 3.0))


def test_a_pipeline_that_was_killed_and_is_not_in_the_next_start_does_not_seem_to_run():
    view = RunView.of([started(pipelines=["a", "b"]), begins(0.0, "a"), begins(0.0, "b"), rollout(0.0, "b", 0)])
    view.apply(started(100.0, pipelines=["a"]))
    assert [view.pipelines[name].status for name in "ab"] == ["waiting", "interrupted"]
    assert view.pipelines["b"].under_way == {}
    view.apply(begins(101.0, "b"))
    assert view.pipelines["b"].status == "running"


def test_a_rollout_ahead_of_training_shows_both_and_ends_in_order():
    view = RunView.of([started(), begins(0.0, "a"), rollout(0.0, "a", 0)])
    a = view.pipelines["a"]
    view.apply(StageEntered(t=1.0, pipeline="a", step=0, stage="train"))
    view.apply(rollout(1.5, "a", 1))
    view.apply(StageEntered(t=2.0, pipeline="a", step=0, stage="update"))
    assert (a.current, a.stage, a.under_way) == (2, "rollout", {1: "update", 2: "rollout"})
    view.apply(StepEnded(t=3.0, pipeline="a", step=0, metrics={"time_s": 3.0}))
    assert (a.step, a.current, a.stage) == (1, 2, "rollout")
    view.apply(StepEnded(t=4.0, pipeline="a", step=1, metrics={"time_s": 2.5}))
    assert (a.step, a.current, a.stage) == (2, 2, None)
    assert a.time.worker_s(9.0) == pytest.approx(2 * 4.0)


def test_numbers_that_are_not_finite_spoil_no_figure_of_sharing():
    events = [started()]
    for k, alone_s in enumerate([1.0, math.nan, math.inf, 0.0]):
        events += step(2.0 * k, 2.0 * k + 2, "a", k, alone_s=alone_s) + step(2.0 * k, 2.0 * k + 2, "b", k, alone_s=1.0)
    events.append(planned(1.0, "share", {"a": math.nan, "b": 0.5}))
    summary = summarise(in_time(*events))
    assert summary.together is None
    assert summary.pipelines[0].slowdown == pytest.approx(2.0)
    printed(in_time(*events))
