import dataclasses
import io
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from longtail.core.events import PipelineEnded, PipelineStarted, Rollback, RunEnded, RunStarted, StepEnded
from longtail.observe.live import RunView
from longtail.observe.store import RunStore, read_events
from longtail.observe.summary import render, summarise
from synthetic_run import (
    COST_S,
    FIRST_LIFE_S,
    GAINED_S,
    PREDICTED_S,
    RESUMED,
    SECOND_LIFE_S,
    STEP_S,
    TOKENS,
    step_events,
    two_pipelines,
)


def printed(summary, width=80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(summary))
    return console.export_text()


def test_the_summary_is_right_across_a_kill_a_resume_and_a_rollback():
    summary = summarise(two_pipelines())
    sums, collatz = summary.pipelines
    assert (sums.status, sums.steps, sums.error) == ("finished", 20, None)
    assert sums.reward_first == pytest.approx((0.05 + 0.10) / 2)
    assert sums.reward_last == pytest.approx((0.95 + 1.00) / 2)
    assert sums.step_time_s == STEP_S
    assert sums.tokens_per_s == TOKENS / STEP_S
    assert sums.checkpoint == "runs/amber-finch/sums/step-20"
    assert (collatz.status, collatz.steps, collatz.steps_goal) == ("failed", 8, 10)
    assert (collatz.reward_first, collatz.reward_last) == (pytest.approx(0.1), pytest.approx(0.8))
    assert collatz.checkpoint == "runs/amber-finch/collatz/step-5"
    assert summary.running_s == pytest.approx(FIRST_LIFE_S + SECOND_LIFE_S)
    assert summary.starts == 2
    assert summary.idle == {0: pytest.approx(0.25), 1: pytest.approx(0.25)}


def test_the_stored_log_gives_the_same_summary_as_the_live_view(tmp_path):
    view, store = RunView(), RunStore(tmp_path)
    for event in two_pipelines():
        view.apply(event)
        store.write(event)
    store.close()
    assert summarise(view) == summarise(read_events(tmp_path)) == summarise(two_pipelines())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 30))
def test_however_often_a_pipeline_falls_back_its_summary_is_that_of_the_undisturbed_run(falls, steps):
    def step(k, reward):
        metrics = {"reward_mean": reward, "time_s": 2.0, "tokens": 10.0, "sequences": 4.0}
        return StepEnded(t=k, pipeline="p", step=k - 1, metrics=metrics)

    def start(done):
        return PipelineStarted(t=0, pipeline="p", step=done, steps=steps, model="m", task="t", parameters=1)

    done, disturbed = 0, [start(0)]
    for i, length in enumerate(falls):
        reached = min(steps, done + length)
        back = (done + reached) // 2
        disturbed += [step(k, 0.1 * k if k <= back else math.nan) for k in range(done + 1, reached + 1)]
        fallen = Rollback(t=0, pipeline="p", step=back, reason="") if i % 2 else start(back)
        disturbed.append(fallen)
        done = back
    disturbed += [step(k, 0.1 * k) for k in range(done + 1, steps + 1)]
    plain = [start(0), *(step(k, 0.1 * k) for k in range(1, steps + 1))]
    assert summarise(disturbed).pipelines == summarise(plain).pipelines


def test_a_resumed_run_on_fewer_workers_counts_each_worker_only_while_it_was_there():
    def started(t, workers):
        return RunStarted(t=t, run="r", version="0", workers=workers, devices=["cpu"] * workers, pipelines=["p"])

    events = [started(0.0, 2), *step_events(0.0, "p", 1, reward=0.0, workers=2), RunEnded(t=2.0, reason="interrupted")]
    events += [started(100.0, 1), *step_events(100.0, "p", 2, reward=0.0, workers=1), RunEnded(t=104.0, reason="ok")]
    summary = summarise(events)
    assert summary.running_s == 6.0
    assert summary.idle == {0: pytest.approx(1 - 3.0 / 6.0), 1: pytest.approx(1 - 1.5 / 2.0)}


def test_moves_are_summed_by_kind_without_those_of_void_steps_and_without_refused_ones():
    sums, collatz = summarise(two_pipelines()).pipelines
    widen = sums.moves["widen"]
    assert (widen.count, widen.refused, widen.judged, widen.priced) == (19, 1, 19, 19)
    assert widen.predicted_net_s == pytest.approx(19 * (PREDICTED_S - 0.02))
    assert widen.net_s == pytest.approx(19 * GAINED_S)
    assert widen.cost_s == pytest.approx(19 * COST_S)
    assert collatz.moves == {}
    assert list(sums.moves) == ["widen"]  # a routine one is none


def test_the_table_counts_moves_and_a_line_says_what_each_kind_brought():
    brought = "widen: gained +4.8 s net (predicted +9.1 s), cost 0.10 s (predicted 0.38 s), 1 refused"
    lines = printed(summarise(two_pipelines()), 120).splitlines()
    assert lines[3].split() == ["pipeline", "moves", "checkpoint"]
    assert "  widen 19  " in lines[4]
    assert "  -  " in lines[5]
    assert brought in lines
    alone = printed(summarise(e for e in two_pipelines() if getattr(e, "pipeline", "sums") == "sums"), 120).splitlines()
    assert alone[0].split()[-2:] == ["moves", "checkpoint"]
    assert "  widen 19  " in alone[1]
    assert brought in alone
    assert "moves" not in printed(summarise(e for e in two_pipelines() if e.kind not in ("move", "move_ended")))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_shows_each_pipeline_and_a_line_for_the_failed_one(width):
    text = printed(summarise(two_pipelines()), width)
    assert max(map(len, text.splitlines())) <= width
    rows = {line.split()[0]: line for line in text.splitlines()[:4]}
    for wanted in ("20", "0.08 → 0.98", "2.0 s", "50.0"):
        assert wanted in rows["sums"]
    assert "8/10" in rows["collatz"]
    assert "workers busy 75 % (w0 75 %, w1 75 %)   ran 50.0 s in 2 starts" in text
    flat = " ".join(text.split())
    assert "collatz failed: reward my_rewards:chain returned 7 values for 16 completions (step 9)." in flat


def test_non_finite_metrics_are_named_with_their_steps_and_spoil_no_number():
    def metrics(step):
        return {2: {"loss": math.nan}, 3: {"loss": math.nan, "kl": -math.inf}, 5: {"reward_mean": math.inf}}.get(step)

    events = [RunStarted(t=0.0, run="r", version="0", workers=1, devices=["cpu"], pipelines=["p", "none"])]
    for step in range(1, 7):
        events += step_events(2.0 * step, "p", step, reward=float(step), workers=1, metrics=metrics(step))
    events.append(PipelineEnded(t=14.0, pipeline="p", step=6, reason="finished"))
    summary = summarise(events)
    assert summary.pipelines[0].nonfinite == (
        "loss is NaN at steps 2 to 3",
        "kl is -inf at step 3",
        "reward_mean is inf at step 5",
    )
    assert summary.pipelines[0].reward_last == 6.0
    assert summary.pipelines[1].reward_first is None
    text = printed(summary)
    assert "p: loss is NaN at steps 2 to 3" in text
    json.dumps(dataclasses.asdict(summary), allow_nan=False)


def test_a_run_without_a_single_event_has_a_summary():
    summary = summarise([])
    assert summary.running_s == 0
    assert summary.idle_mean is None
    assert "ran" in printed(summary)


def test_markup_and_escapes_in_an_error_are_shown_as_text():
    error = "bad [red]\x1b[31m reward\nsecond line"
    text = printed(summarise([PipelineEnded(t=0.0, pipeline="p", step=0, reason="failed", error=error)]))
    assert "p failed: bad [red] reward second line" in text


def test_a_killed_run_has_no_reason_and_counts_up_to_its_last_event():
    killed = [e for e in two_pipelines() if e.t < RESUMED]
    summary = summarise(killed)
    assert summary.reason is None
    assert summary.running_s == pytest.approx(FIRST_LIFE_S)
