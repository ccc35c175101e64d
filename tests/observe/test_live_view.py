import math

import pytest

from longtail.core.events import (
    PipelineStarted,
    Progress,
    Rollback,
    RunEnded,
    RunStarted,
    SequenceEnded,
    Span,
    StageEntered,
    StepEnded,
    WorkerLost,
)
from longtail.observe.live import RunView
from longtail.observe.views import QUIET_S, WINDOW_S
from synthetic_run import START, STEP_S, step_events, two_pipelines


def started(t=0.0, workers=1):
    return RunStarted(t=t, run="r", version="0", workers=workers, devices=["cpu"] * workers, pipelines=["p"])


def span(start, end, busy_s, *, substage="decode", tokens=0, worker=0, tp=1, pipeline="p"):
    return Span(
        t=end, worker=worker, pipeline=pipeline, substage=substage, step=0, start=start, end=end, busy_s=busy_s,
        quanta=1, tokens=tokens, batch=2.0, tp=tp,
    )  # fmt: skip


def progress(t, worker, *, pipeline="p", substage="decode", waiting=0, running=0):
    return Progress(
        t=t, worker=worker, pipeline=pipeline, substage=substage, waiting=waiting, running=running, lanes_used=0,
        lanes_total=9,
    )  # fmt: skip


def sequence(step, sample):
    return SequenceEnded(
        t=1.0, pipeline="p", step=step, prompt=0, sample=sample, worker=0, prompt_tokens=1, tokens=1, finish="stop",
        preemptions=0, start=0.0, end=1.0,
    )  # fmt: skip


def test_the_view_follows_step_stage_samples_and_rewards():
    view = RunView.of(
        [started(), PipelineStarted(t=0, pipeline="p", step=0, steps=9, model="m", task="t", parameters=1)]
    )
    p = view.pipelines["p"]
    view.apply(StageEntered(t=0, pipeline="p", step=0, stage="rollout"))
    assert (p.step, p.current, p.stage, p.samples_expected) == (0, 1, "rollout", None)
    view.apply(
        Progress(t=0, worker=0, pipeline="p", substage="decode", waiting=1, running=3, lanes_used=0, lanes_total=9)
    )
    assert (p.samples_done, p.samples_expected) == (0, 4)
    view.apply(sequence(0, 0))
    assert p.samples_done == 1
    view.apply(StepEnded(t=2, pipeline="p", step=0, metrics={"reward_mean": 0.5, "sequences": 4.0}))
    view.apply(StageEntered(t=2, pipeline="p", step=1, stage="rollout"))
    assert (p.step, p.current, p.samples_done, p.samples_expected) == (1, 2, 0, 4)
    assert p.rewards == [0.5]
    view.apply(StageEntered(t=3, pipeline="p", step=9, stage="checkpoint"))
    assert p.current == 9


def test_a_rollback_forgets_later_steps_checkpoints_and_the_half_done_step():
    view = RunView()
    for event in two_pipelines():
        view.apply(event)
        if isinstance(event, Rollback) and event.step == 10:
            sums = view.pipelines["sums"]
            assert sums.rewards == [pytest.approx(0.05 * k) for k in range(1, 11)]
            assert (sums.step, sums.samples_done, sums.stage) == (10, 0, None)
            assert sums.checkpoint == "runs/amber-finch/sums/step-10"
    assert view.pipelines["sums"].rewards == [pytest.approx(0.05 * k) for k in range(1, 21)]
    assert (view.reason, view.starts) == ("finished", 2)


def test_utilisation_is_the_busy_share_of_a_sliding_window():
    view = RunView.of([started(workers=2)])
    assert view.utilisation(0) is None
    for i in range(40):
        view.apply(span(i * 0.5, i * 0.5 + 0.5, 0.5 if i < 20 else 0.25))
    assert view.utilisation(0) == pytest.approx(0.5)  # the last 10 s
    assert view.utilisation(1) == 0.0
    assert view.work(0) == "p decode b=2"
    assert view.work(1) == "idle"


def test_a_worker_between_two_reports_keeps_its_utilisation_and_a_quiet_one_becomes_idle():
    view = RunView.of([started(), *(span(i, i + 1.0, 0.8) for i in range(10))])
    assert view.utilisation(0, now=10.0 + QUIET_S / 2) == pytest.approx(0.8)
    assert view.utilisation(0, now=10.0 + WINDOW_S / 2) == pytest.approx(0.4)
    assert view.utilisation(0, now=10.0 + 2 * WINDOW_S) == 0.0
    assert view.work(0, now=10.0 + 2 * WINDOW_S) == "idle"


def test_concurrent_tenants_share_a_worker_and_the_window():
    view = RunView.of([started()])
    for i in range(10):
        view.apply(span(i, i + 1.0, 0.5))
        view.apply(span(i, i + 1.0, 0.5, substage="train"))
    assert view.utilisation(0) == pytest.approx(1.0)


def test_tokens_per_second_counts_decoded_tokens_of_all_workers():
    view = RunView.of([started(workers=2)])
    for i in range(20):
        for worker in range(2):
            view.apply(span(i, i + 1.0, 1.0, tokens=50, worker=worker))
            view.apply(span(i, i + 1.0, 1.0, tokens=999, worker=worker, substage="prefill"))
    assert view.pipelines["p"].tokens_per_s() == pytest.approx(100.0)


def test_a_window_holds_only_recent_spans_in_memory():
    view = RunView.of([started(), *(span(i, i + 1.0, 1.0, tokens=1) for i in range(5000))])
    assert len(view.workers[0]._spans) < 20
    assert len(view.pipelines["p"]._decoded) < 20


def test_each_spell_of_a_non_finite_metric_is_reported_once_where_it_begins():
    view, said = RunView.of([started()]), []
    bad = {3: {"loss": math.nan}, 4: {"loss": math.nan}, 5: {"loss": math.inf}, 8: {"loss": math.nan, "kl": -math.inf}}
    for step in range(1, 10):
        for event in step_events(START + step * STEP_S, "p", step, reward=0.5, metrics=bad.get(step)):
            said += [(note.level, note.pipeline, note.message) for note in view.apply(event)]
    assert said == [
        ("warning", "p", "loss is NaN at step 3"),
        ("warning", "p", "loss is inf at step 5"),
        ("warning", "p", "loss is NaN at step 8; kl is -inf at step 8"),
    ]
    view.apply(Rollback(t=START + 99, pipeline="p", step=3, reason="test"))
    assert list(map(str, view.pipelines["p"].spells)) == ["loss is NaN at step 3"]


def test_a_resumed_run_shows_waiting_pipelines_and_forgets_old_windows():
    view = RunView()
    for event in two_pipelines():
        view.apply(event)
        if isinstance(event, RunStarted) and event.resumed:
            assert {p.status for p in view.pipelines.values()} == {"waiting"}
            assert view.utilisation(0) is None
            assert view.work(0) == "idle"


def test_tokens_of_a_tensor_parallel_group_count_once_and_its_workers_are_busy_each_for_itself():
    view = RunView.of([started(workers=3)])
    for i in range(10):
        for worker in range(2):
            view.apply(span(i, i + 1.0, 0.9 - 0.2 * worker, tokens=80, worker=worker, tp=2))
        view.apply(span(i, i + 1.0, 0.5, tokens=20, worker=2))
    assert view.pipelines["p"].tokens_per_s() == pytest.approx(100.0)
    assert [view.utilisation(w) for w in range(3)] == [pytest.approx(0.9), pytest.approx(0.7), pytest.approx(0.5)]
    assert view.groups() == [(0, 1), (2,)]
    assert [view.work(w) for w in range(3)] == ["TP2 p decode b=2", "TP2 p decode b=2", "p decode b=2"]


def test_workers_are_shown_together_while_they_sample_together():
    view = RunView.of([started(workers=5)])
    for worker in range(4):
        view.apply(span(0, 1.0, 1.0, worker=worker, tp=2))
    view.apply(span(0, 1.0, 1.0, worker=4))
    assert view.groups() == [(0, 1), (2, 3), (4,)]
    for worker in range(4):
        view.apply(span(1.0, 1.0, 0.0, substage="switch", worker=worker, tp=2))
        view.apply(span(1.0, 2.0, 1.0, worker=worker, tp=4))
    assert view.groups() == [(0, 1, 2, 3), (4,)]
    view.apply(span(2.0, 3.0, 1.0, substage="train", worker=0))
    view.apply(progress(3.0, 1, substage="train"))
    assert view.groups() == [(0,), (1,), (2, 3), (4,)]
    assert view.groups(now=3.0 + 2 * WINDOW_S) == [(0,), (1,), (2,), (3,), (4,)]
    view.apply(WorkerLost(t=3.0, worker=2, reason="?"))
    assert view.groups() == [(0,), (1,), (2,), (3,), (4,)]
    view.apply(RunEnded(t=3.0, reason="finished"))
    assert view.groups() == [(0,), (1,), (2,), (3,), (4,)]


def test_groups_of_two_pipelines_are_two_groups():
    view = RunView.of([started(workers=4)])
    for worker, pipeline in enumerate("ppqq"):
        view.apply(span(0, 1.0, 1.0, worker=worker, tp=2, pipeline=pipeline))
    assert view.groups() == [(0, 1), (2, 3)]


def test_samples_of_a_tensor_parallel_group_are_expected_once():
    view = RunView.of(
        [started(workers=3), PipelineStarted(t=0, pipeline="p", step=0, steps=9, model="m", task="t", parameters=1)]
    )
    view.apply(StageEntered(t=0, pipeline="p", step=0, stage="rollout"))
    for worker in range(3):
        view.apply(span(0, 1.0, 1.0, worker=worker, tp=3))
        view.apply(progress(1.0, worker, waiting=3, running=4))
    assert view.pipelines["p"].samples_expected == 7
    assert view.work(1) == "TP3 p decode b=4"


def test_a_pipeline_that_waits_for_a_group_to_end_does_not_seem_to_work():
    view = RunView.of([started(workers=2)])
    for worker in range(2):
        view.apply(span(0, 1.0, 1.0, worker=worker, tp=2))
        view.apply(progress(1.0, worker, pipeline="q", substage="train"))
    assert view.groups() == [(0, 1)]
    assert view.work(0) == "TP2 p decode b=2"
    view.apply(span(1.0, 2.0, 1.0, worker=0, pipeline="q", substage="train"))
    assert view.work(0) == "q train"
