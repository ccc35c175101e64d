"""Asynchronous pipelines: rollouts ahead of training, with weights of a known age, and the same results every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.harness import Outcome, run_inline, small_pipeline
from longtail.cluster.messages import Generate, OpenPipeline, Refresh, Update
from longtail.core.config import SharingPolicy
from longtail.core.events import MoveMade, PipelineEnded, Span, StageEntered, StepEnded, WorkerLost
from longtail.costs.table import TableKey
from longtail.planner.state import Stage
from simulated_run import COSTS, WIDE, pipeline, simulate

STEPS = 4


def job(staleness: int = 1, **changes):
    return small_pipeline(max_staleness=staleness, **{"steps": STEPS, "checkpoint__every": 100, **changes})


def assert_same_learning(one: Outcome, other: Outcome, name: str = "a") -> None:
    mine, theirs = one.record.steps(name), other.record.steps(name)
    assert mine.keys() == theirs.keys()
    for step, metrics in mine.items():
        for key in ("reward_mean", "loss", "grad_norm", "tokens", "length_max", "logprob_diff_max"):
            assert metrics[key] == theirs[step][key], (step, key)
    for key, tensor in one.weights(name).items():
        assert torch.equal(tensor, other.weights(name)[key]), key


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By staleness, a run with the workers to itself."""
    runs: dict[int, Outcome] = {}

    def get(staleness: int) -> Outcome:
        if staleness not in runs:
            folder = tmp_path_factory.mktemp(f"alone-{staleness}")
            runs[staleness] = run_inline({"a": job(staleness)}, folder, workers=2)
        return runs[staleness]

    return get


@pytest.mark.parametrize("staleness", [1, 2])
def test_every_step_is_as_stale_as_it_may_be_and_no_staler(alone, staleness):
    steps = alone(staleness).record.steps("a")
    assert [steps[k]["staleness"] for k in range(STEPS)] == [min(k, staleness) for k in range(STEPS)]


def test_a_synchronous_pipeline_has_no_staleness_and_no_copy_to_refresh(alone):
    assert "staleness" not in alone(0).record.steps("a")[0]
    assert not any(isinstance(command, Refresh) for _, command in alone(0).cluster.sent)


def test_the_loss_compares_with_the_weights_that_sampled(alone):
    """The first step is sampled with the weights that it trains; later ones with older weights."""
    gaps = [alone(1).record.steps("a")[k]["logprob_diff_max"] for k in range(STEPS)]
    assert gaps[0] < 1e-6 < min(gaps[1:])


def test_staleness_changes_what_is_learned_but_not_the_first_update(alone):
    fresh, stale = alone(0).record.steps("a"), alone(1).record.steps("a")
    assert fresh[0]["grad_norm"] == stale[0]["grad_norm"]
    assert fresh[2]["loss"] != stale[2]["loss"]


@pytest.mark.parametrize("staleness", [1, 2])
def test_the_same_pipeline_gives_the_same_bits_again_and_in_company(tmp_path, alone, staleness):
    jobs = {"a": job(staleness), "b": small_pipeline(task="collatz", rollout__max_tokens=50, steps=3)}
    shared = run_inline(jobs, tmp_path / "shared", workers=2)
    assert_same_learning(alone(staleness), shared)


def test_the_rollout_of_a_step_begins_before_the_one_before_is_trained(alone):
    order = [(e.stage, e.step) for e in alone(1).record.events if isinstance(e, StageEntered)]
    for step in range(STEPS - 1):
        assert order.index(("rollout", step + 1)) < order.index(("update", step)), step
    synchronous = [(e.stage, e.step) for e in alone(0).record.events if isinstance(e, StageEntered)]
    for step in range(STEPS - 1):
        assert synchronous.index(("rollout", step + 1)) > synchronous.index(("update", step)), step


TAIL = [[200] * 4, *([[20] * 4] * 3)]


def overlaps(spans: list[Span]) -> bool:
    """Whether a training and the rollout of the step after it are under way together."""
    return any(
        one.substage == "train" and other.substage == "decode" and other.step == one.step + 1
        and one.start < other.end and other.start < one.end
        for one in spans for other in spans
    )  # fmt: skip


def test_no_group_forms_in_front_of_the_micro_batches_of_the_step_before(tmp_path):
    """Alone and with groups that pay: they form at the start of the first rollout, and of others in the tail."""
    costs = replace(WIDE, per_train_token_s=3e-3, update_s=0.05)
    table = costs.table(
        TableKey("simulated", "none", "float32", "simulated", 1), measured="", degrees=(2, 4), fine=False
    )
    formed = []

    def on_event(event, cluster, controller):
        if isinstance(event, MoveMade) and event.move == "widen":
            formed.append((event.step, controller.drivers["a"].state(cluster.clock.time()).stage))

    asked = pipeline(max_staleness=1, steps=6, rollout__prompts=4, train__micro_tokens=250, checkpoint__every=100)
    run = simulate({"a": asked}, TAIL, tmp_path, workers=4, costs=lambda *_: costs, table=table, on_event=on_event)
    assert formed
    assert {stage for _, stage in formed} <= {Stage.ROLLOUT, Stage.SCORE}
    assert overlaps([e for e in run.record.events if isinstance(e, Span)])


def test_an_interrupted_pipeline_does_not_wait_for_a_lease_that_another_rollout_holds(tmp_path):
    """On a virtual clock: a group of a fixed degree has two of three workers. The third one samples and trains the
    other pipeline, which would like to update then."""
    stopped = []

    def on_event(event, cluster, controller):
        controller.drivers["b"].begin_on = (2,)
        update = isinstance(event, StageEntered) and (event.pipeline, event.stage) == ("b", "update")
        if update and controller.drivers["a"].widen.degree == 2 and not stopped:
            stopped.append((event.step, controller.drivers["a"].step))
            controller.stop("b")

    wide = pipeline(rollout__tp=2, rollout__prompts=2, steps=4, checkpoint__every=100)
    quick = pipeline(rollout__tp=1, rollout__prompts=2, steps=9, checkpoint__every=100)
    run = simulate({"a": wide, "b": quick}, TAIL, tmp_path, workers=3, costs=lambda *_: WIDE, on_event=on_event)
    assert stopped, "no update ever waited"
    ((step, before),) = stopped
    (ended,) = [e for e in run.record.events if isinstance(e, PipelineEnded) and e.pipeline == "b"]
    assert (ended.reason, ended.step) == ("interrupted", step), "the update is dropped"
    over = [e.t for e in run.record.events if isinstance(e, StepEnded) and (e.pipeline, e.step) == ("a", before)]
    assert ended.t < over[0]


def test_training_fills_the_time_in_which_the_tail_of_the_next_rollout_leaves_workers_idle(tmp_path):
    """On a virtual clock: one prompt of each step runs ten times as long as the others."""
    asked = {"rollout__prompts": 4, "train__micro_tokens": 250, "steps": 6, "checkpoint__every": 100}
    took_s, beside = [], []
    for staleness in (0, 1):
        job = pipeline(max_staleness=staleness, **asked)
        costs = replace(COSTS, per_train_token_s=3e-3, update_s=0.05)
        folder = tmp_path / str(staleness)
        run = simulate({"a": job}, TAIL, folder, workers=4, costs=lambda *_, costs=costs: costs)
        events = run.record.events
        took_s.append(max(e.t for e in events))
        spans = [e for e in events if isinstance(e, Span)]
        beside.append(overlaps(spans))
    assert beside == [False, True]
    assert took_s[1] < 0.9 * took_s[0]


@pytest.mark.parametrize("stage", ["rollout", "train", "update"])
def test_a_worker_killed_in_the_middle_costs_time_and_nothing_that_is_learned(tmp_path, alone, stage):
    """There is no checkpoint yet, so that it begins anew."""
    killed = []

    def kill_once(event, cluster, controller):
        if isinstance(event, StageEntered) and (event.stage, event.step) == (stage, 2) and not killed:
            killed.append(event)
            cluster.kill(1)

    run = run_inline({"a": job()}, tmp_path, workers=2, on_event=kill_once)
    assert any(isinstance(e, WorkerLost) for e in run.record.events)
    assert_same_learning(alone(1), run)


@pytest.mark.parametrize("stage", ["train", "update"])
def test_an_interrupted_run_goes_on_from_its_weights(tmp_path, alone, stage):
    def interrupt(event, cluster, controller):
        if isinstance(event, StageEntered) and (event.stage, event.step) == (stage, 1):
            controller.interrupt()

    cut = run_inline({"a": job()}, tmp_path, workers=2, on_event=interrupt)
    assert cut.controller.drivers["a"].stage == "interrupted"
    done = cut.controller.drivers["a"].step
    resumed = run_inline({"a": job()}, tmp_path, workers=2)
    assert resumed.controller.drivers["a"].stage == "finished"
    steps = resumed.record.steps("a")
    assert set(steps) == set(range(done, STEPS))
    assert [steps[k]["staleness"] for k in range(done, STEPS)] == [min(1, k - done) for k in range(done, STEPS)]
    for step in range(done):
        assert cut.record.steps("a")[step]["loss"] == alone(1).record.steps("a")[step]["loss"]


def test_tensor_parallel_groups_change_nothing_learned(tmp_path, alone):
    wide = run_inline({"a": job(rollout__tp=2)}, tmp_path, workers=2)
    assert {e.tp for e in wide.record.events if isinstance(e, Span) and e.substage == "decode"} == {2}
    assert_same_learning(alone(1), wide)


@pytest.mark.parametrize("corun", ["stages", "serial"])
def test_taking_turns_changes_nothing_learned(tmp_path, alone, corun):
    """Each has the workers to itself, for a stage or for a step."""
    jobs = {"a": job(2), "b": job(0, seed=3)}
    shared = run_inline(jobs, tmp_path, workers=2, policy=SharingPolicy(corun=corun))
    assert shared.controller.drivers["b"].stage == "finished"
    assert_same_learning(alone(2), shared)
    assert shared.record.steps("b")[1]["wait_s"] > 0


@settings(max_examples=25, deadline=None)
@given(
    staleness=st.integers(0, 3), steps=st.integers(1, 6), workers=st.integers(1, 3),
    train_s=st.sampled_from([1e-6, 1e-4, 3e-3]), update_s=st.sampled_from([0.001, 0.5, 5.0]),
    lengths=st.lists(st.lists(st.integers(1, 120), min_size=4, max_size=4), min_size=5, max_size=5),
    kill=st.none() | st.floats(0.5, 20.0),
)  # fmt: skip
def test_every_request_is_sampled_with_weights_of_the_age_that_its_step_asks_for(
    tmp_path_factory, staleness, steps, workers, train_s, update_s, lengths, kill
):
    """By the commands that a worker gets, in their order; however long anything takes, and if a worker dies."""
    costs = replace(COSTS, per_train_token_s=train_s, update_s=update_s)
    commands: list = []
    asked = pipeline(
        steps=steps, max_staleness=staleness, rollout__prompts=3, rollout__max_tokens=120, checkpoint__every=2
    )

    def on_event(event, cluster, controller):
        if kill is not None and not commands:
            cluster.kill(workers - 1, after_s=kill)
        if not commands:
            commands.append(None)
            send = cluster.send

            def listen(worker, sent):
                commands.extend((worker, command) for command in sent)
                send(worker, sent)

            cluster.send = listen

    folder = tmp_path_factory.mktemp("stale")
    run = simulate({"a": asked}, lengths, folder, workers=workers, costs=lambda *_: costs, on_event=on_event)
    assert run.controller.drivers["a"].stage == "finished"
    assert set(run.record.steps("a")) == set(range(steps))
    for worker in range(workers):
        first = version = trained = 0
        for to, command in commands[1:]:
            if to != worker:
                continue
            match command:
                case OpenPipeline():
                    first = version = trained = int(command.optimizer[-6:]) if command.optimizer else 0
                case Update():
                    trained += 1
                case Refresh():
                    assert command.updates == trained, "the copy is made of other weights than it says"
                    version = trained
                case Generate():
                    used = version if staleness else trained
                    assert used == max(first, command.step - staleness), (worker, command.step)


def test_a_step_that_ends_has_taken_the_time_of_its_stages(alone):
    for staleness in (0, 1):
        for metrics in alone(staleness).record.steps("a").values():
            parts = sum(metrics[f"{stage}_s"] for stage in ("wait", "rollout", "score", "train", "update"))
            assert metrics["time_s"] == pytest.approx(parts)


def test_steps_end_in_order(alone):
    for staleness in (0, 1, 2):
        assert [e.step for e in alone(staleness).record.events if isinstance(e, StepEnded)] == list(range(STEPS))
