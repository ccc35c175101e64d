"""Whatever goes wrong in one pipeline ends that pipeline, frees its memory, and changes nothing in the others."""

from __future__ import annotations

import weakref

import pytest
import torch

from e2e.harness import Outcome, run_inline, small_pipeline
from longtail.cluster.tenant import Tenant
from longtail.core.events import PipelineEnded, Rollback, StepEnded
from longtail.rl.trainer import Trainer

GOOD = small_pipeline(seed=2, steps=3)
BAD_LR = 7e-4
"""By which a trainer is known as that of the pipeline ``bad``."""
BAD = small_pipeline(steps=3, train__lr=BAD_LR)


def assert_good_was_not_touched(outcome: Outcome, alone: Outcome) -> None:
    good = outcome.controller.drivers["good"]
    assert good.stage == "finished"
    assert not [e for e in outcome.record.events if isinstance(e, Rollback) and e.pipeline == "good"]
    for name, tensor in outcome.weights("good").items():
        assert torch.equal(tensor, alone.weights("good")[name])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[int, Outcome]:
    """The good pipeline by itself, by number of workers."""
    return {n: run_inline({"good": GOOD}, tmp_path_factory.mktemp(f"alone{n}"), workers=n) for n in (1, 2)}


def raising(error: Exception, *, worker: int, step: int, original):
    """A method of :class:`Tenant` that raises in one step of the pipeline ``bad`` on one worker."""

    def method(self: Tenant, *arguments):
        if self.name == "bad" and self.worker == worker and self.step >= step:
            raise error
        return original(self, *arguments)

    return method


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
NO_HOST_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.mark.parametrize(
    ("where", "error", "says", "workers"),
    [
        ("run_quantum", MemoryError(), "has not enough memory (MemoryError", 2),
        ("generate", NO_HOST_MEMORY, "has not enough memory (RuntimeError", 1),
        ("update", NO_MEMORY, "lower train.micro_tokens", 2),
        ("update", ZeroDivisionError("a bug"), "ZeroDivisionError: a bug", 1),
        ("save", ZeroDivisionError("a bug"), "ZeroDivisionError: a bug", 2),
    ],
)
def test_an_error_on_a_worker_ends_its_pipeline_and_changes_nothing_in_another(
    tmp_path, monkeypatch, alone, where, error, says, workers
):
    monkeypatch.setattr(Tenant, where, raising(error, worker=0, step=1, original=getattr(Tenant, where)))
    outcome = run_inline({"bad": BAD, "good": GOOD}, tmp_path, workers=workers)
    bad = outcome.controller.drivers["bad"]
    assert bad.stage == "failed"
    assert says in bad.error
    assert "other pipelines go on" in bad.error
    assert_good_was_not_touched(outcome, alone[workers])


def test_after_an_error_of_memory_nothing_of_the_pipeline_is_left_while_others_go_on(tmp_path, monkeypatch):
    held, left = [], []
    original = Tenant.run_quantum

    def run_quantum(self: Tenant):
        if self.name != "bad" or self.step < 1:
            return original(self)
        flat = self.trainer.flat
        held.extend(weakref.ref(thing) for thing in (self, self.model, self.engine, flat.weights, flat.grads))
        big = torch.ones(1000)
        held.append(weakref.ref(big))
        raise MemoryError

    def look(event, cluster, controller):
        if isinstance(event, StepEnded) and event.pipeline == "good" and event.step == 2:
            left.extend(reference() for reference in held if reference() is not None)

    monkeypatch.setattr(Tenant, "run_quantum", run_quantum)
    outcome = run_inline({"bad": BAD, "good": GOOD}, tmp_path, on_event=look)
    ended = [e for e in outcome.record.events if isinstance(e, PipelineEnded | StepEnded)]
    names = [(type(e).__name__, e.pipeline, e.step) for e in ended]
    assert names.index(("PipelineEnded", "bad", 1)) < names.index(("StepEnded", "good", 2))
    assert len(held) >= 6
    assert left == []


def test_a_loss_that_is_not_a_number_ends_its_pipeline_with_its_weights_as_they_were(tmp_path, monkeypatch, alone):
    original = Trainer.micro_batch

    def micro_batch(self: Trainer, *arguments, **named):
        stats = original(self, *arguments, **named)
        if self.train.lr == BAD_LR:
            self.flat.grads.fill_(float("nan"))
        return stats

    monkeypatch.setattr(Trainer, "micro_batch", micro_batch)
    outcome = run_inline({"bad": BAD, "good": GOOD}, tmp_path, workers=2)
    assert "not finite" in outcome.controller.drivers["bad"].error
    assert_good_was_not_touched(outcome, alone[2])


def test_task_code_that_raises_ends_its_pipeline_and_changes_nothing_in_another(tmp_path, monkeypatch, alone):
    from longtail.rl.tasks.collatz import Collatz

    calls = []
    original = Collatz.example

    def example(self, index):
        calls.append(index)
        if len(calls) > 4:
            raise KeyError("a row that is not there")
        return original(self, index)

    monkeypatch.setattr(Collatz, "example", example)
    outcome = run_inline({"bad": small_pipeline(task="collatz"), "good": GOOD}, tmp_path, workers=2)
    assert "a row that is not there" in outcome.controller.drivers["bad"].error
    assert_good_was_not_touched(outcome, alone[2])


def test_a_reward_that_is_no_number_ends_its_pipeline_and_changes_nothing_in_another(tmp_path, alone):
    (tmp_path / "odd_rewards.py").write_text(
        "def odd(prompts, completions, **columns):\n    return [float('nan')] * len(completions)\n"
    )
    jobs = {"bad": small_pipeline(reward="odd_rewards:odd"), "good": GOOD}
    outcome = run_inline(jobs, tmp_path, workers=2)
    assert "odd" in outcome.controller.drivers["bad"].error
    assert_good_was_not_touched(outcome, alone[2])
