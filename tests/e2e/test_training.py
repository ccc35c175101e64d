"""Training on several workers: who computes what changes no bit, and what cannot be learnt from ends one pipeline."""

from __future__ import annotations

import threading

import pytest
import torch

from e2e.harness import run_inline, small_pipeline
from longtail.cluster.messages import TrainBatches
from longtail.rl.trainer import Trainer


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_who_computes_which_micro_batch_changes_no_bit(tmp_path, monkeypatch, dtype):
    """Two at a time; one at a time; and with a worker that in each step has not done its first one before the others
    have done all the rest."""
    steps = 2
    job = small_pipeline(dtype=dtype, steps=steps, rollout__prompts=6, train__micro_tokens=60)
    compute = Trainer.micro_batch

    def dealt_by(name):
        run = run_inline({"a": job}, tmp_path / name, workers=3)
        given = [(worker, c) for worker, c in run.cluster.sent if isinstance(c, TrainBatches)]
        return run, [(worker, c.step) for worker, c in given for _ in c.batches]

    usual, given = dealt_by("usual")
    for_others = [sum(of == step for _, of in given) - 1 for step in range(steps)]
    begun_by_first, done_by_others, done = [], [], threading.Condition()

    def last_on_the_first(self, *args, **named):
        if self.rank == 0:
            begun_by_first.append(self)
            awaited = sum(for_others[: len(begun_by_first)])
            with done:
                done.wait_for(lambda: len(done_by_others) == awaited, 60)
            return compute(self, *args, **named)
        stats = compute(self, *args, **named)
        with done:
            done_by_others.append(self)
            done.notify_all()
        return stats

    monkeypatch.setattr("longtail.runtime.train_phase.AHEAD", 1)
    single, _ = dealt_by("single")
    monkeypatch.setattr(Trainer, "micro_batch", last_on_the_first)
    uneven, given = dealt_by("uneven")
    assert min(for_others) > 2
    assert [step for worker, step in given if worker == 0] == list(range(steps)), "the slow one takes one of each step"
    for other in (single, uneven):
        assert {k: m["loss"] for k, m in usual.record.steps("a").items()} == {
            k: m["loss"] for k, m in other.record.steps("a").items()
        }
        for name, tensor in usual.weights("a").items():
            assert torch.equal(tensor, other.weights("a")[name]), name


def test_a_worker_that_gets_no_micro_batch_takes_part_in_the_update(tmp_path):
    job = small_pipeline(steps=2, rollout__prompts=1, algorithm__group_size=2, train__micro_tokens=10_000)
    run = run_inline({"a": job}, tmp_path, workers=4)
    given = {worker for worker, c in run.cluster.sent if isinstance(c, TrainBatches)}
    assert given < {0, 1, 2, 3}
    assert run.controller.drivers["a"].stage == "finished"
    assert run.controller.drivers["a"].step == 2


@pytest.mark.parametrize(("dtype", "words"), [("float32", "the loss of step 1 is"), ("float64", "is not finite")])
def test_what_is_not_finite_ends_its_pipeline_with_a_sentence_and_no_other(tmp_path, dtype, words):
    (tmp_path / "huge_rewards.py").write_text(
        "def huge(prompts, completions, **columns):\n"
        "    return [1e300 * (-1) ** i for i, _ in enumerate(completions)]\n"
    )
    bad = small_pipeline(dtype=dtype, reward="huge_rewards:huge", algorithm__scale_rewards="none")
    outcome = run_inline({"bad": bad, "good": small_pipeline(task="collatz")}, tmp_path, workers=2)
    driver = outcome.controller.drivers["bad"]
    assert driver.stage == "failed"
    assert words in driver.error
    assert "other pipelines go on" in driver.error
    assert driver.step == 0
    assert outcome.controller.drivers["good"].stage == "finished"
    assert set(outcome.record.steps("good")) == {0, 1, 2}
