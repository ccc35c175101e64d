"""Tensor-parallel groups inside a rollout: whatever the layout, and whenever it changes, the same is learned."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from e2e.harness import Outcome, run_inline, small_pipeline
from longtail.core.errors import PeerLost
from longtail.core.events import MoveEnded, MoveMade, Span, WorkerLost
from longtail.engine.handoff import carry_out

pytestmark = pytest.mark.usefixtures("in_step")

STEPS = 2


def long_tailed(folder: Path, *, rows: int = 8, seed: int = 0) -> dict:
    """A job in fixed-length mode: a few responses are far longer than the others."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [[rng.choice([2, 4, 6, 9, rng.randint(100, 250)]) for _ in range(8)] for _ in range(rows)]
    data = [{"prompt": f"reverse {i}:", "lengths": row} for i, row in enumerate(lengths)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (folder / "widen_rewards.py").write_text(
        "def vowels(prompts, completions, **columns):\n"
        "    return [float(sum(c in 'aeiou' for c in text)) for text in completions]\n"
    )
    return {
        "task": "rows.jsonl", "reward": "widen_rewards:vowels", "rollout__prompts": 4, "rollout__max_tokens": 260,
        "rollout__forced_lengths": "lengths", "steps": STEPS,
    }  # fmt: skip


def run(folder: Path, *, tp: int | str, workers: int, **options) -> Outcome:
    job = long_tailed(folder)
    pipeline = small_pipeline(**job, rollout__tp=tp, **options.pop("changes", {}))
    return run_inline({"a": pipeline}, folder, workers=workers, base=folder, **options)


def assert_same_learning(one: Outcome, other: Outcome) -> None:
    mine, theirs = one.record.steps("a"), other.record.steps("a")
    assert mine.keys() == theirs.keys() == set(range(STEPS))
    for step, metrics in mine.items():
        for name in ("reward_mean", "reward_std", "loss", "grad_norm", "tokens", "length_max"):
            assert metrics[name] == theirs[step][name], (step, name)
    for name, tensor in one.weights("a").items():
        assert torch.equal(tensor, other.weights("a")[name]), name
    for outcome in (one, other):
        ends = [(s.step, s.prompt, s.sample) for s in outcome.record.sequences("a")]
        assert len(ends) == len(set(ends)) == STEPS * 16


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """By dtype and workers, a run that never leaves data parallelism."""
    runs: dict = {}

    def get(workers: int, dtype: str = "float64") -> Outcome:
        if (workers, dtype) not in runs:
            folder = tmp_path_factory.mktemp("narrow")
            runs[workers, dtype] = run(folder, tp=1, workers=workers, changes={"dtype": dtype})
        return runs[workers, dtype]

    return get


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("communicator", ["shm", "gloo"])
def test_a_whole_rollout_in_tensor_parallel_learns_the_same(tmp_path, narrow, communicator, dtype):
    wide = run(tmp_path, tp=2, workers=2, communicator=communicator, changes={"dtype": dtype})
    assert_same_learning(narrow(2, dtype), wide)
    degrees = {e.tp for e in wide.record.events if isinstance(e, Span) and e.substage == "decode"}
    assert degrees == {2}
    assert {s.worker for s in wide.record.sequences("a")} == {0}


@pytest.mark.parametrize("workers", [3, 4])
def test_more_workers_make_wider_or_more_groups_and_learn_the_same(tmp_path, narrow, workers):
    wide = run(tmp_path, tp=workers, workers=workers)
    assert_same_learning(narrow(workers), wide)
    if workers == 4:
        pairs = run(tmp_path / "pairs", tp=2, workers=4)
        assert_same_learning(narrow(4), pairs)
        assert {s.worker for s in pairs.record.sequences("a")} == {0, 2}


@pytest.mark.parametrize("threshold", [2, 6, 16])
def test_merging_in_mid_rollout_learns_the_same(tmp_path, narrow, threshold):
    merged = run(tmp_path, tp=f"threshold:{threshold}", workers=2)
    assert_same_learning(narrow(2), merged)
    made = [e for e in merged.record.events if isinstance(e, MoveMade) and e.move == "widen"]
    ended = [e for e in merged.record.events if isinstance(e, MoveEnded)]
    assert len(ended) == STEPS
    assert [(e.step, e.layout) for e in made] == [(step, "TP2") for step in range(STEPS)]
    assert all(e.refused is None and e.rest_s > 0 and e.gain_s is not None for e in ended)
    assert any(e.moved_bytes > 0 for e in ended)
    degrees = {e.tp for e in merged.record.events if isinstance(e, Span) and e.substage == "decode"}
    assert degrees == ({1, 2} if threshold < 16 else {2}), "16 are all that there are"


@pytest.mark.parametrize(("tp", "step"), [(2, 0), (2, 1), ("threshold:16", 0), ("threshold:16", 1)])
@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_worker_killed_around_a_switch_changes_nothing_that_is_learned(
    tmp_path, narrow, monkeypatch, tp, step, moment
):
    """Before: it is gone when the others come to meet it. Within: they have planned together, and lanes are to move."""
    killed, seen, victim = [], {}, 1 if moment == "before" else 0

    def kill(cluster) -> None:
        killed.append(victim)
        cluster.kill(victim)

    def on_event(event, cluster, controller):
        seen["cluster"] = cluster
        if isinstance(event, MoveMade) and event.step == step:
            seen["switching"] = True
            if moment == "before" and not killed:
                kill(cluster)

    def interrupted(plan, comm, *args):
        if seen.get("switching") and moment == "within" and comm.rank == victim and not killed:
            kill(seen["cluster"])
            raise PeerLost("this rank was killed")
        return carry_out(plan, comm, *args)

    monkeypatch.setattr("longtail.cluster.tenant.carry_out", interrupted)
    outcome = run(tmp_path, tp=tp, workers=2, on_event=on_event)
    assert killed
    assert any(isinstance(e, WorkerLost) for e in outcome.record.events)
    steps, expected = outcome.record.steps("a"), narrow(2).record.steps("a")
    assert {step: m["loss"] for step, m in steps.items()} == {step: m["loss"] for step, m in expected.items()}
    for name, tensor in narrow(2).weights("a").items():
        assert torch.equal(tensor, outcome.weights("a")[name]), name


def test_a_pipeline_that_others_wait_for_lets_go_of_its_group(tmp_path, narrow):
    """A fixed degree takes the workers for each of its rollouts, and the other pipeline has its turn in between."""
    job, other = long_tailed(tmp_path), small_pipeline(rollout__prompts=2, steps=2)
    both = run_inline({"a": small_pipeline(**job, rollout__tp=2), "b": other}, tmp_path, workers=2, base=tmp_path)
    alone = run_inline({"b": other}, tmp_path / "alone", workers=2)
    for name, tensor in narrow(2).weights("a").items():
        assert torch.equal(tensor, both.weights("a")[name]), name
    for name, tensor in alone.weights("b").items():
        assert torch.equal(tensor, both.weights("b")[name]), name


def test_with_other_work_for_the_workers_auto_stays_narrow_and_learns_the_same(tmp_path, narrow):
    job, other = long_tailed(tmp_path), small_pipeline(rollout__prompts=4, rollout__max_tokens=60, steps=4)
    both = run_inline({"a": small_pipeline(**job, rollout__tp="auto"), "b": other}, tmp_path, workers=2, base=tmp_path)
    for name, tensor in narrow(2).weights("a").items():
        assert torch.equal(tensor, both.weights("a")[name]), name
    assert both.controller.drivers["b"].stage == "finished"
