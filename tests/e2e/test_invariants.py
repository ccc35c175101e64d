"""What must always hold: schedules, sharing, lanes and crashes change nothing that is learned."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from e2e.harness import Outcome, run_inline, small_pipeline
from longtail.core.errors import CheckpointError
from longtail.core.events import Note, StageEntered, StepEnded, WorkerLost
from longtail.engine.models import resolve_model
from longtail.rl import checkpoint

ROUNDING = 1e-8
"""Other micro-batches round otherwise, and gradients are rounded to a grid (``rl/exact.py``), at a learning rate of
1e-3 and where a weight's gradient is next to nothing."""


def assert_same_training(one: Outcome, other: Outcome, pipeline: str, *, tolerance: float = 0.0) -> None:
    mine, theirs = one.record.steps(pipeline), other.record.steps(pipeline)
    assert mine.keys() == theirs.keys()
    for step, metrics in mine.items():
        for name in ("reward_mean", "loss", "grad_norm", "tokens", "length_max"):
            assert metrics[name] == pytest.approx(theirs[step][name], rel=tolerance, abs=tolerance), (step, name)
    weights, others = one.weights(pipeline), other.weights(pipeline)
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=tolerance, atol=tolerance)


def test_every_sample_ends_exactly_once(tmp_path):
    outcome = run_inline({"a": small_pipeline()}, tmp_path, workers=2)
    keys = [(s.step, s.prompt, s.sample) for s in outcome.record.sequences("a")]
    assert sorted(keys) == [(step, p, s) for step in range(3) for p in range(3) for s in range(4)]


def test_sharing_workers_changes_nothing_learned(tmp_path):
    a, b = small_pipeline(), small_pipeline(task="collatz", seed=5, rollout__max_tokens=60)
    together = run_inline({"a": a, "b": b}, tmp_path / "together", workers=2)
    alone = run_inline({"a": a}, tmp_path / "a", workers=2)
    also_alone = run_inline({"b": b}, tmp_path / "b", workers=2)
    assert_same_training(together, alone, "a")
    assert_same_training(together, also_alone, "b")


def test_the_same_run_in_float32_gives_the_same_bits(tmp_path):
    jobs = {"a": small_pipeline(dtype="float32"), "b": small_pipeline(dtype="float32", seed=1)}
    one = run_inline(jobs, tmp_path / "one", workers=2)
    alone = run_inline({"b": jobs["b"]}, tmp_path / "alone", workers=2)
    assert_same_training(one, alone, "b")


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_token_and_no_weight(tmp_path, workers):
    job = small_pipeline()
    one = run_inline({"a": job}, tmp_path / "one", workers=1)
    more = run_inline({"a": job}, tmp_path / "more", workers=workers)
    assert_same_training(one, more, "a", tolerance=ROUNDING)


def test_a_kv_budget_too_small_for_the_batch_is_slower_but_gives_the_same_tokens(tmp_path):
    job = small_pipeline(task="collatz", rollout__max_tokens=120)
    plenty = run_inline({"a": job}, tmp_path / "plenty")
    tight = run_inline({"a": job}, tmp_path / "tight", kv_blocks=40)
    assert sum(s.preemptions for s in tight.record.sequences("a")) > 0
    assert sum(s.preemptions for s in plenty.record.sequences("a")) == 0
    assert_same_training(plenty, tight, "a", tolerance=1e-9)


@pytest.mark.parametrize("stage", ["rollout", "train", "update"])
def test_a_worker_killed_during_a_step_changes_nothing_learned(tmp_path, stage):
    jobs = {"a": small_pipeline(steps=4, checkpoint__every=2), "b": small_pipeline(seed=3)}
    undisturbed = run_inline(jobs, tmp_path / "undisturbed", workers=2)
    killed = []

    def kill_once(event, cluster, controller):
        if isinstance(event, StageEntered) and (event.stage, event.step) == (stage, 1) and not killed:
            killed.append(event)
            cluster.kill(1)

    disturbed = run_inline(jobs, tmp_path / "disturbed", workers=2, on_event=kill_once)
    assert any(isinstance(e, WorkerLost) for e in disturbed.record.events)
    for name in jobs:
        assert_same_training(undisturbed, disturbed, name)


def test_workers_lost_together_during_the_last_save_cost_no_step(tmp_path):
    job = {"a": small_pipeline(checkpoint__every=2)}
    undisturbed = run_inline(job, tmp_path / "undisturbed", workers=3)
    killed = []

    def kill_two(event, cluster, controller):
        if isinstance(event, StageEntered) and event.stage == "checkpoint" and not killed:
            killed.append(event)
            cluster.kill(0)
            cluster.kill(2)

    disturbed = run_inline(job, tmp_path / "disturbed", workers=3, on_event=kill_two)
    assert disturbed.controller.drivers["a"].stage == "finished"
    assert disturbed.controller.drivers["a"].saver.last_step == 3
    assert_same_training(undisturbed, disturbed, "a")


def test_a_worker_that_dies_again_and_again_ends_the_run_with_the_reason(tmp_path):
    def kill_always(event, cluster, controller):
        if isinstance(event, StageEntered) and event.stage == "rollout":
            cluster.kill(1)

    outcome = run_inline({"a": small_pipeline()}, tmp_path, workers=2, on_event=kill_always)
    error = outcome.controller.drivers["a"].error
    assert "workers were lost 4 times" in error
    assert "other pipelines" not in error


@pytest.mark.parametrize("stage", ["load", "rollout", "train", "update", "checkpoint"])
def test_an_interrupt_at_any_stage_ends_cleanly_and_loses_nothing(tmp_path, stage):
    jobs = {"a": small_pipeline(steps=2, algorithm__iterations=2, checkpoint__every=1)}
    whole = run_inline(jobs, tmp_path / "whole", workers=2)

    def interrupt(event, cluster, controller):
        if isinstance(event, StageEntered) and event.stage == stage:
            controller.interrupt()

    cut = run_inline(jobs, tmp_path / "cut", workers=2, on_event=interrupt)
    assert cut.controller.drivers["a"].stage in ("interrupted", "finished")
    resumed = run_inline(jobs, tmp_path / "cut", workers=2)
    for name, tensor in whole.weights("a").items():
        assert torch.equal(tensor, resumed.weights("a")[name])


def test_rewards_without_any_spread_leave_the_weights_exactly_as_they_are(tmp_path):
    (tmp_path / "flat_rewards.py").write_text("def flat(prompts, completions, **columns):\n    return [1.0] * 4\n")
    outcome = run_inline({"a": small_pipeline(reward="flat_rewards:flat")}, tmp_path)
    before = load_file(resolve_model("tiny") / "model.safetensors")
    for name, tensor in outcome.weights("a").items():
        assert torch.equal(tensor, before[name].double()), name
    metrics = outcome.record.steps("a")[0]
    assert metrics["flat_group_fraction"] == 1
    assert metrics["loss"] == 0
    assert "logprob_diff_max" in metrics


def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path):
    jobs = {"a": small_pipeline(steps=5, checkpoint__every=3)}
    whole = run_inline(jobs, tmp_path / "whole", workers=2)

    def interrupt(event, cluster, controller):
        if isinstance(event, StepEnded) and event.step == 1:
            controller.interrupt()

    first = run_inline(jobs, tmp_path / "cut", workers=2, on_event=interrupt)
    assert first.controller.drivers["a"].stage == "interrupted"
    assert first.controller.drivers["a"].saver.last_step in (2, 3)
    second = run_inline(jobs, tmp_path / "cut", workers=2)
    second.record.events[:0] = first.record.events
    assert_same_training(whole, second, "a")


def test_a_run_resumes_on_another_number_of_workers(tmp_path):
    whole = run_inline({"a": small_pipeline(steps=4)}, tmp_path / "whole", workers=1)
    run_inline({"a": small_pipeline(steps=2)}, tmp_path / "moved", workers=2)
    moved = run_inline({"a": small_pipeline(steps=4)}, tmp_path / "moved", workers=3)
    for name, tensor in whole.weights("a").items():
        torch.testing.assert_close(tensor, moved.weights("a")[name], rtol=ROUNDING, atol=ROUNDING)


def test_two_iterations_over_a_step_use_the_samplers_log_probs(tmp_path):
    outcome = run_inline({"a": small_pipeline(algorithm__iterations=2)}, tmp_path, workers=2)
    # The second pass sees moved weights, so the trainer's log-probs differ from the sampler's.
    assert outcome.record.steps("a")[0]["logprob_diff_max"] > 1e-6


def test_the_sampler_and_the_trainer_agree_on_log_probs(tmp_path):
    outcome = run_inline({"a": small_pipeline(dtype="float32"), "b": small_pipeline()}, tmp_path)
    assert max(m["logprob_diff_max"] for m in outcome.record.steps("a").values()) <= 1e-4
    assert max(m["logprob_diff_max"] for m in outcome.record.steps("b").values()) <= 1e-6


def test_three_workers_share_prompts_that_do_not_divide_and_one_prompt_is_split(tmp_path):
    seven = small_pipeline(rollout__prompts=7, steps=1)
    single = small_pipeline(rollout__prompts=1, steps=1, seed=9)
    one = run_inline({"seven": seven, "single": single}, tmp_path / "one")
    three = run_inline({"seven": seven, "single": single}, tmp_path / "three", workers=3)
    assert len({s.worker for s in three.record.sequences("single")}) == 3
    for name in ("seven", "single"):
        assert_same_training(one, three, name, tolerance=ROUNDING)


def test_training_moves_the_weights(tmp_path):
    outcome = run_inline({"a": small_pipeline()}, tmp_path)
    before = load_file(resolve_model("tiny") / "model.safetensors")
    after = outcome.weights("a")
    assert any((after[name].double() - tensor.double()).abs().max() > 1e-3 for name, tensor in before.items())


def test_a_reward_that_raises_ends_its_pipeline_and_no_other(tmp_path):
    (tmp_path / "bad_rewards.py").write_text(
        "def grumpy(prompts, completions, **columns):\n    raise ValueError('no')\n"
    )
    jobs = {"bad": small_pipeline(reward="bad_rewards:grumpy"), "good": small_pipeline(task="collatz")}
    outcome = run_inline(jobs, tmp_path, workers=2)
    bad, good = outcome.controller.drivers["bad"], outcome.controller.drivers["good"]
    assert bad.stage == "failed"
    assert "grumpy" in bad.error
    assert "other pipelines go on" in bad.error
    assert good.stage == "finished"
    assert set(outcome.record.steps("good")) == {0, 1, 2}


def test_a_prompt_that_no_worker_can_hold_ends_its_pipeline_with_the_reason(tmp_path):
    outcome = run_inline({"a": small_pipeline(), "b": small_pipeline(rollout__max_tokens=400)}, tmp_path, kv_blocks=40)
    assert "KV blocks" in outcome.controller.drivers["b"].error
    assert outcome.controller.drivers["a"].stage == "finished"


def test_a_checkpoint_that_cannot_be_written_is_loud_and_only_fatal_at_the_end(tmp_path):
    (tmp_path / "a").write_text("a file where the folder of checkpoints should be")
    outcome = run_inline({"a": small_pipeline()}, tmp_path)
    driver = outcome.controller.drivers["a"]
    assert driver.step == 3
    assert driver.stage == "failed"
    assert any("Training goes on" in note for note in outcome.record.notes())


def test_what_there_is_of_a_checkpoint_on_a_full_disk_makes_room_for_the_next(tmp_path, monkeypatch):
    write, seen = checkpoint.write_optimizer_shard, []

    def full_at_first(folder, trainer):
        seen.append([p.name for p in folder.parent.glob(".step-*")])
        if len(seen) > 1:
            return write(folder, trainer)
        (folder / "optimizer-0-of-1.safetensors").write_bytes(b"a part")
        raise CheckpointError(f"cannot write {folder}: No space left on device")

    left = []

    def look(event, cluster, controller):
        if isinstance(event, Note) and "Training goes on" in event.message:
            assert "No space left on device. Training" in event.message
            left.extend((tmp_path / "a").iterdir())

    monkeypatch.setattr(checkpoint, "write_optimizer_shard", full_at_first)
    job = small_pipeline(steps=2, checkpoint__every=1)
    outcome = run_inline({"a": job}, tmp_path, on_event=look)
    assert outcome.controller.drivers["a"].stage == "finished"
    assert len(seen) == 2
    assert left == []
    assert checkpoint.latest(tmp_path / "a").step == 2


def test_damaged_checkpoints_are_never_silently_replaced_by_a_fresh_start(tmp_path):
    run_inline({"a": small_pipeline(steps=1)}, tmp_path)
    (tmp_path / "a" / "step-000001" / "model.safetensors").write_bytes(b"")
    outcome = run_inline({"a": small_pipeline(steps=2)}, tmp_path)
    assert outcome.controller.drivers["a"].stage == "failed"
    assert "--fresh" in outcome.controller.drivers["a"].error
