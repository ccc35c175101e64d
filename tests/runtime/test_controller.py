"""The controller: pipelines come, go and fail while others run, and connections are mended behind their backs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from longtail.cluster.messages import ClosePipeline, Connect, OpenPipeline, Shares
from longtail.core.config import SharingPolicy
from longtail.core.errors import CapacityError
from longtail.core.events import Note, PipelineEnded, PipelineStarted, Rollback, StageEntered, StepEnded, WorkerLost
from longtail.runtime.turns import By
from simulated_jobs import BrokenRows, World, all_samples
from simulated_run import Rows, pipeline

GREEDY = SharingPolicy(corun="greedy")


def at(world: World, kind: type, do, **fields) -> None:
    """Call ``do`` at the first event of this kind and with these fields."""
    before = world.on_event
    done = []

    def look(event) -> None:
        before(event)
        if not done and isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
            done.append(event)
            do()

    world.on_event = look


def test_a_pipeline_may_come_while_others_run(tmp_path):
    jobs = {"a": pipeline(steps=3), "b": pipeline(steps=2, seed=1)}
    world = World(tmp_path, {"a": jobs["a"]})
    at(world, StepEnded, lambda: world.submit("b", jobs["b"]), pipeline="a", step=0)
    world.run()
    assert {name: world.stage(name) for name in jobs} == {"a": "finished", "b": "finished"}
    assert world.samples() == {name: all_samples(job) for name, job in jobs.items()}
    started = next(e.t for e in world.record.events if isinstance(e, PipelineStarted) and e.pipeline == "b")
    assert started < max(e.t for e in world.record.events if isinstance(e, StepEnded) and e.pipeline == "a")


def test_a_name_may_be_had_again_only_when_its_pipeline_is_over(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=2)}, ends_after=3)
    refused = []

    def again() -> None:
        with pytest.raises(ValueError, match="pipeline a is not over yet"):
            world.submit("a", pipeline(steps=2))
        refused.append("a")

    def twice() -> None:
        world.submit("a", pipeline(steps=1, seed=1), folder=tmp_path / "other")
        again()

    at(world, StepEnded, again, pipeline="a", step=0)
    at(world, PipelineEnded, twice, pipeline="a", step=2)
    at(world, PipelineEnded, lambda: world.submit("b", pipeline(steps=1)), pipeline="a", step=1)
    first = world.controller.drivers["a"]
    world.run()
    second = world.controller.ended["a"]
    assert len(refused) == 2
    assert (first.stage, second.stage) == ("finished", "finished")
    assert second.checkpoint is not None
    assert second.checkpoint.parent == tmp_path / "other"
    assert second.attempt > first.attempt, "reports of the first could pass for the second's"


def test_of_several_that_come_together_all_begin_or_none(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=2)}, ends_after=3)
    names = ["b", "a", "c"]

    def together() -> None:
        with pytest.raises(ValueError, match="pipeline a is not over yet"):
            world.controller.submit(*(world.plan(name, pipeline(steps=1)) for name in names))
        names.remove("a")
        world.controller.submit(*(world.plan(name, pipeline(steps=1)) for name in names))

    at(world, StepEnded, together, pipeline="a", step=0)
    world.run()
    assert [e.pipeline for e in world.record.events if isinstance(e, PipelineStarted)] == ["a", "b", "c"]
    assert {name: world.stage(name) for name in "abc"} == dict.fromkeys("abc", "finished")


@pytest.mark.parametrize("corun", ["auto", "greedy", "serial"])
def test_a_controller_that_keeps_running_keeps_little_of_pipelines_that_are_over(tmp_path, corun):
    """What they came to, and neither plans, tasks nor what was learnt of their lengths."""
    jobs = {f"job{i}": pipeline(steps=1 + i % 2, seed=i) for i in range(6)}
    world = World(tmp_path, ends_after=len(jobs) + 1, policy=SharingPolicy(corun=corun), fails_at={"job2": 1})
    kept: list[weakref.ref] = []

    def come(names: Iterator[str]) -> None:
        if (name := next(names, None)) is not None:
            task = Rows(world.lengths)
            kept.append(weakref.ref(task))
            world.submit(name, jobs[name], task=task)

    names = iter(jobs)
    before = world.on_event

    def go_on(event) -> None:
        before(event)
        if isinstance(event, PipelineEnded):
            world.cluster.later(30.0, lambda: come(names))
            if len(world.ended) + 1 == len(jobs):
                world.cluster.later(60.0, look)

    def look() -> None:
        gc.collect()
        assert [ref() for ref in kept] == [None] * len(jobs)
        assert world.controller.drivers == {}
        world.controller.stop("job1")  # which is over
        world.submit("last", pipeline(steps=1))

    world.on_event = go_on
    come(names)
    come(names)
    world.run()
    stages = {name: outcome.stage for name, outcome in world.controller.outcomes().items()}
    assert stages == {name: "failed" if name == "job2" else "finished" for name in [*jobs, "last"]}
    assert "the reward function raised" in str(world.controller.ended["job2"].error)
    assert world.controller.ended["job3"].step == 2


def test_a_stopped_pipeline_saves_and_ends_and_goes_on_from_there_when_it_comes_again(tmp_path):
    jobs = {"a": pipeline(steps=4, checkpoint__every=9), "b": pipeline(steps=3, seed=1)}
    world = World(tmp_path, jobs, ends_after=3)
    at(world, StepEnded, lambda: world.controller.stop("a"), pipeline="a", step=1)
    at(world, PipelineEnded, lambda: world.submit("a", jobs["a"]), pipeline="a")
    world.run()
    reasons = [(e.pipeline, e.reason) for e in world.record.events if isinstance(e, PipelineEnded)]
    assert sorted(reasons) == [("a", "finished"), ("a", "interrupted"), ("b", "finished")]
    assert [e.step for e in world.record.events if isinstance(e, Rollback)] == [2]
    assert world.samples() == {name: all_samples(job) for name, job in jobs.items()}


@pytest.mark.parametrize("stage", ["load", "rollout", "train", "update", "checkpoint"])
@pytest.mark.parametrize("corun", ["greedy", "stages", "serial"])
def test_a_stop_at_any_stage_frees_the_workers_and_holds_up_nobody(tmp_path, stage, corun):
    jobs = {"a": pipeline(steps=3, checkpoint__every=1), "b": pipeline(steps=3, seed=1)}
    world = World(tmp_path, jobs, policy=SharingPolicy(corun=corun))
    at(world, StageEntered, lambda: world.controller.stop("a"), pipeline="a", stage=stage)
    world.run()
    assert world.stage("a") in ("interrupted", "finished")
    assert world.stage("b") == "finished"
    assert world.samples()["b"] == all_samples(jobs["b"])
    for worker in range(2):
        with pytest.raises(KeyError):
            world.cluster.worker(worker).tenant("a")


def test_to_stop_what_is_over_changes_nothing_and_what_never_was_is_an_error(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=1), "b": pipeline(steps=3)})
    at(world, PipelineEnded, lambda: world.controller.stop("a"), pipeline="a")
    world.run()
    assert (world.stage("a"), world.stage("b")) == ("finished", "finished")
    with pytest.raises(ValueError, match="there is no pipeline c"):
        world.controller.stop("c")


def test_a_pipeline_that_is_stopped_before_it_was_begun_ends_without_a_step(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=2)})

    def come_and_go() -> None:
        world.submit("b", pipeline())
        world.controller.stop("b")

    at(world, StepEnded, come_and_go, pipeline="a", step=0)
    world.run()
    assert world.stage("b") == "interrupted"
    assert "b" not in world.samples()


def test_a_controller_that_keeps_running_waits_for_pipelines_from_another_thread_until_it_is_interrupted(tmp_path):
    world = World(tmp_path, ends_after=2, patience_s=float("inf"))
    one_has_ended = threading.Event()
    at(world, PipelineEnded, one_has_ended.set)

    def come() -> None:
        world.submit("a", pipeline(steps=1))
        assert one_has_ended.wait(240)
        world.submit("b", pipeline(steps=1))

    thread = threading.Thread(target=come)
    thread.start()
    world.run()
    thread.join()
    assert world.ended == ["a", "b"]
    with pytest.raises(ValueError, match="comes too late"):
        world.submit("c", pipeline())


def test_a_controller_that_does_not_keep_running_ends_with_its_last_pipeline(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=1)}).run()
    with pytest.raises(ValueError, match="comes too late"):
        world.submit("b", pipeline())


def test_a_pipeline_that_ends_is_closed_on_every_worker(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=1), "b": pipeline(steps=3)})
    sent = []
    send = world.cluster.send
    world.cluster.send = lambda worker, commands: (sent.extend((worker, c) for c in commands), send(worker, commands))
    world.run()
    for name in "ab":
        closed = [worker for worker, c in sent if isinstance(c, ClosePipeline) and c.pipeline == name]
        assert sorted(closed) == [0, 1]


@pytest.mark.parametrize("stage", ["load", "rollout", "update"])
def test_a_lost_worker_takes_a_pipeline_that_has_just_come_back_to_its_start_with_all_others(tmp_path, stage):
    jobs = {"a": pipeline(steps=3, checkpoint__every=1), "b": pipeline(steps=2, seed=1)}
    world = World(tmp_path, {"a": jobs["a"]})
    at(world, StepEnded, lambda: world.submit("b", jobs["b"]), pipeline="a", step=0)
    at(world, StageEntered, lambda: world.cluster.kill(1), pipeline="b", stage=stage)
    world.run()
    assert any(isinstance(e, WorkerLost) for e in world.record.events)
    assert {e.pipeline for e in world.record.events if isinstance(e, Rollback)} == {"a", "b"}
    assert world.samples() == {name: all_samples(job) for name, job in jobs.items()}


def test_workers_that_cannot_be_replaced_end_a_controller_that_was_to_keep_running(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=9)}, ends_after=9)

    def no_more(worker: int) -> None:
        raise CapacityError("there are no machines left")

    world.cluster.restart = no_more
    at(world, StageEntered, lambda: world.cluster.kill(1), stage="rollout")
    at(world, WorkerLost, lambda: world.submit("late", pipeline()))
    with pytest.raises(CapacityError, match="no machines left"):
        world.run()
    for name in ("a", "late"):
        assert "no machines left" in str(world.controller.outcomes()[name].error)


def test_a_fresh_worker_is_told_the_weights_that_the_others_have(tmp_path):
    jobs = {"a": pipeline(steps=3, checkpoint__every=1, priority=2.0), "b": pipeline(steps=3, priority=3.0)}
    world = World(tmp_path, jobs)
    sent = []
    send = world.cluster.send
    world.cluster.send = lambda worker, commands: (sent.extend((worker, c) for c in commands), send(worker, commands))
    at(world, StageEntered, lambda: world.cluster.kill(1), stage="rollout", step=1)
    world.run()
    told = [worker for worker, c in sent if isinstance(c, Shares) and dict(c.weights) == {"a": 2.0, "b": 3.0}]
    assert told == [0, 1, 1]


def test_task_code_that_raises_ends_its_pipeline_with_its_words_and_no_other(tmp_path):
    broken = BrokenRows([[20] * 4] * 8)
    broken.first = 8  # from the second step on
    world = World(tmp_path, {"good": pipeline(steps=3)})
    at(
        world, StageEntered,
        lambda: world.submit("bad", pipeline(steps=3), task=type("Long", (BrokenRows,), {"size": 99, "first": 3})([])),
        pipeline="good", stage="rollout",
    )  # fmt: skip
    world.run()
    assert "ZeroDivisionError" in world.controller.drivers["bad"].error
    assert any("no example" in note for note in world.record.notes())
    assert world.samples()["good"] == all_samples(pipeline(steps=3))


def test_a_reward_function_that_raises_ends_its_pipeline_and_no_other(tmp_path):
    jobs = {"good": pipeline(steps=3), "bad": pipeline(steps=3, seed=1)}
    for corun in ("greedy", "stages", "serial"):
        world = World(tmp_path / corun, jobs, fails_at={"bad": 2}, policy=SharingPolicy(corun=corun)).run()
        assert (world.stage("good"), world.stage("bad")) == ("finished", "failed")
        assert "the reward function raised" in world.controller.drivers["bad"].error
        assert world.samples()["good"] == all_samples(jobs["good"])


@pytest.mark.parametrize(("corun", "by"), [("greedy", By.NOTHING), ("stages", By.STAGE), ("serial", By.STEP)])
def test_the_policy_says_what_a_turn_lasts_for(tmp_path, corun, by):
    assert World(tmp_path, policy=SharingPolicy(corun=corun)).controller._turns.by is by


@pytest.mark.parametrize("corun", ["stages", "serial"])
def test_in_turns_no_two_pipelines_sample_or_train_at_once(tmp_path, corun):
    jobs = {name: pipeline(steps=3, seed=seed) for seed, name in enumerate("abc")}
    world = World(tmp_path, jobs, policy=SharingPolicy(corun=corun)).run()
    spans = sorted(
        (e.start, e.end, e.pipeline) for e in world.record.events
        if getattr(e, "substage", "") in ("prefill", "decode", "train", "reduce")
    )  # fmt: skip
    assert {pipeline for _, _, pipeline in spans} == set("abc")
    last_end: dict[str, float] = {}
    for start, end, name in spans:
        assert all(start >= other_end - 1e-6 for other, other_end in last_end.items() if other != name)
        last_end[name] = max(end, last_end.get(name, 0.0))


def test_an_error_in_the_planning_of_shares_leaves_pipelines_side_by_side_and_is_told_once(tmp_path, monkeypatch):
    from longtail.runtime.conductor import Conductor

    def turn(self) -> None:
        raise ArithmeticError("the planner is at its wits' end")

    monkeypatch.setattr(Conductor, "turn", turn)
    jobs = {"a": pipeline(steps=2), "b": pipeline(steps=2)}
    world = World(tmp_path, jobs, policy=SharingPolicy()).run()
    assert [world.stage(name) for name in jobs] == ["finished", "finished"]
    notes = [e for e in world.record.events if isinstance(e, Note) and "wits' end" in e.message]
    assert len(notes) == 1


def test_commands_to_open_reach_a_worker_after_those_that_connect_it(tmp_path):
    world = World(tmp_path, {"a": pipeline(steps=1)})
    sent = []
    send = world.cluster.send
    world.cluster.send = lambda worker, commands: (sent.extend(commands), send(worker, commands))
    world.run()
    kinds = [type(c) for c in sent]
    assert kinds.index(Connect) < kinds.index(OpenPipeline)
