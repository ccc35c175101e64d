"""Rollouts on some of the workers, that merge and spread in mid-rollout: the same is learned, to the last bit."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from e2e.harness import Outcome, run_inline, small_pipeline
from e2e.test_widen import STEPS, assert_same_learning
from longtail.cluster.messages import Switch
from longtail.core.errors import PeerLost
from longtail.core.events import MoveEnded, MoveMade, Note, Span, WorkerLost
from longtail.costs.decode import DecodeCosts
from longtail.engine.handoff import carry_out
from longtail.engine.switch_plan import Refusal
from moving import Then, move_about
from simulated_run import COSTS, WIDE, pipeline, simulate

pytestmark = pytest.mark.usefixtures("in_step")

THERE_AND_BACK = (Then(4, (0, 1)), Then(12, (1,)), Then(40, (0, 1)))


def job(folder: Path, **changes):
    """In fixed-length mode: some responses are far longer than the others."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"reverse {i}:", "lengths": [rng.choice([2, 5, 9, 15, rng.randint(50, 80)]) for _ in range(8)]}
        for i in range(8)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "merge_rewards.py").write_text(
        "def vowels(prompts, completions, **columns):\n"
        "    return [float(sum(c in 'aeiou' for c in text)) for text in completions]\n"
    )
    usual = {
        "task": "rows.jsonl", "reward": "merge_rewards:vowels", "rollout__prompts": 4, "rollout__max_tokens": 90,
        "rollout__forced_lengths": "lengths", "rollout__tp": 1, "steps": STEPS,
    }  # fmt: skip
    return small_pipeline(**usual, **changes)


def run(folder: Path, *, workers: int = 2, **options) -> Outcome:
    pipeline = job(folder, **options.pop("changes", {}))
    return run_inline({"a": pipeline}, folder, workers=workers, base=folder, **options)


def moves(outcome: Outcome) -> list[tuple[str, tuple[int, ...]]]:
    """The first step's, as they were carried out."""
    made = [e for e in outcome.record.events if isinstance(e, MoveMade) and e.step == 0]
    return [(e.move, tuple(e.workers)) for e in made if e.move in ("place", "merge", "spread")]


def ends(outcome: Outcome) -> list[MoveEnded]:
    return [e for e in outcome.record.events if isinstance(e, MoveEnded)]


@pytest.fixture(scope="module")
def still(tmp_path_factory):
    """By dtype and workers, a run on all workers from beginning to end."""
    runs: dict = {}

    def get(workers: int = 2, dtype: str = "float64") -> Outcome:
        if (workers, dtype) not in runs:
            runs[workers, dtype] = run(tmp_path_factory.mktemp("still"), workers=workers, changes={"dtype": dtype})
        return runs[workers, dtype]

    return get


def test_a_rollout_on_one_of_two_workers_learns_the_same(tmp_path, still, monkeypatch):
    expected = still()
    move_about(monkeypatch, (1,))
    placed = run(tmp_path)
    assert_same_learning(expected, placed)
    assert {s.worker for s in placed.record.sequences("a")} == {1}
    assert moves(placed) == [("place", (1,))]
    trained = {e.worker for e in placed.record.events if isinstance(e, Span) and e.substage == "train"}
    assert trained == {0, 1}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("communicator", ["shm", "gloo"])
def test_spreading_and_merging_in_mid_rollout_learns_the_same(tmp_path, still, monkeypatch, communicator, dtype):
    expected = still(2, dtype)
    move_about(monkeypatch, (0,), THERE_AND_BACK)
    moved = run(tmp_path, communicator=communicator, changes={"dtype": dtype})
    assert_same_learning(expected, moved)
    assert moves(moved) == [("place", (0,)), ("spread", (0, 1)), ("merge", (1,)), ("spread", (0, 1))]
    assert all(e.refused is None and e.rest_s > 0 and e.gain_s is None for e in ends(moved))
    assert any(e.moved_bytes > 0 for e in ends(moved))
    assert {s.worker for s in moved.record.sequences("a")} == {0, 1}
    degrees = {e.tp for e in moved.record.events if isinstance(e, Span) and e.substage == "decode"}
    assert degrees == {1}


@pytest.mark.parametrize("how", ["move", "recompute"])
def test_whichever_way_lanes_go_the_same_is_learned(tmp_path, still, monkeypatch, how):
    expected = still()
    monkeypatch.setattr("longtail.runtime.widen.Switch", lambda **values: Switch(**values, how=how))
    move_about(monkeypatch, None, [Then(9, (0,)), Then(30, (0, 1))])
    moved = run(tmp_path)
    assert_same_learning(expected, moved)
    assert any(e.moved_bytes > 0 for e in ends(moved)) is (how == "move")
    assert any(e.recomputed_tokens > 0 for e in ends(moved)) is (how == "recompute")


def test_three_workers_become_one_and_two(tmp_path, still, monkeypatch):
    expected = still(3)
    move_about(monkeypatch, None, [Then(6, (2,)), Then(20, (0, 1)), Then(40, (0, 1, 2))])
    moved = run(tmp_path, workers=3)
    assert_same_learning(expected, moved)
    assert moves(moved) == [("merge", (2,)), ("spread", (0, 1)), ("spread", (0, 1, 2))]


def test_a_worker_that_has_too_few_lanes_for_all_samples_takes_them_one_after_the_other(tmp_path, still, monkeypatch):
    expected = still()
    move_about(monkeypatch, None, [Then(12, (0,))])
    tight = run(tmp_path, kv_blocks=50)
    assert_same_learning(expected, tight)
    assert moves(tight) == [("merge", (0,))]
    assert all(e.refused is None for e in ends(tight))
    assert sum(s.preemptions for s in tight.record.sequences("a")) > 0


def test_a_merge_that_is_refused_leaves_the_samples_where_they_are(tmp_path, still, monkeypatch):
    expected = still()
    monkeypatch.setattr("longtail.cluster.tenant.plan_switch", lambda *args, **options: Refusal("there is no room"))
    move_about(monkeypatch, None, [Then(6, (0,))])
    outcome = run(tmp_path)
    assert_same_learning(expected, outcome)
    assert {e.refused for e in ends(outcome)} == {"there is no room"}
    assert {s.worker for s in outcome.record.sequences("a")} == {0, 1}
    warnings = [e for e in outcome.record.events if isinstance(e, Note) and e.level == "warning"]
    assert len(warnings) == STEPS


@pytest.mark.parametrize(("on", "move"), [(None, Then(6, (0,))), ((0,), Then(6, (0, 1)))], ids=["merge", "spread"])
@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_worker_killed_around_a_move_changes_nothing_that_is_learned(tmp_path, still, monkeypatch, on, move, moment):
    """Before: it is gone when the others come to meet it. Within: they have planned together, and lanes are to move."""
    expected, killed, seen, victim = still(), [], {}, 1 if moment == "before" else 0

    def kill(cluster) -> None:
        killed.append(victim)
        cluster.kill(victim)

    def on_event(event, cluster, controller):
        seen["cluster"] = cluster
        if isinstance(event, MoveMade) and event.move in ("merge", "spread") and event.step == 1:
            seen["moving"] = True
            if moment == "before" and not killed:
                kill(cluster)

    def interrupted(plan, comm, *args):
        if seen.get("moving") and moment == "within" and comm.rank == victim and not killed:
            kill(seen["cluster"])
            raise PeerLost("this rank was killed")
        return carry_out(plan, comm, *args)

    monkeypatch.setattr("longtail.cluster.tenant.carry_out", interrupted)
    move_about(monkeypatch, on, [move])
    outcome = run(tmp_path, on_event=on_event)
    assert killed
    assert any(isinstance(e, WorkerLost) for e in outcome.record.events)
    steps, usual = outcome.record.steps("a"), expected.record.steps("a")
    assert {step: m["loss"] for step, m in steps.items()} == {step: m["loss"] for step, m in usual.items()}
    for name, tensor in expected.weights("a").items():
        assert torch.equal(tensor, outcome.weights("a")[name]), name


def test_moving_beside_another_pipeline_changes_neither(tmp_path, still, monkeypatch):
    other = small_pipeline(rollout__prompts=4, rollout__max_tokens=60, steps=3)
    expected, alone = still(), run_inline({"b": other}, tmp_path / "alone", workers=2)
    move_about(monkeypatch, (0,), THERE_AND_BACK)
    both = run_inline({"a": job(tmp_path), "b": other}, tmp_path, workers=2, base=tmp_path)
    assert ("spread", (0, 1)) in moves(both)
    for name, tensor in expected.weights("a").items():
        assert torch.equal(tensor, both.weights("a")[name]), name
    for name, tensor in alone.weights("b").items():
        assert torch.equal(tensor, both.weights("b")[name]), name


def test_a_simulated_rollout_moves_in_the_same_way(tmp_path, monkeypatch):
    lengths = [[5, 60, 9, 150], [150, 7, 30, 30], [12, 90, 150, 4], [20, 20, 20, 20]]
    move_about(monkeypatch, (0,), [Then(4, (0, 1, 2)), Then(50, (1,)), Then(100, (0, 2))])
    moved = simulate(
        {"a": pipeline(rollout__prompts=4, rollout__tp=1, steps=2)}, lengths, tmp_path, workers=3, costs=lambda *_: WIDE
    )
    samples = [(s.step, s.prompt, s.sample, s.tokens) for s in moved.record.sequences("a")]
    assert len(samples) == len(set(samples)) == 2 * 16
    assert sorted(s[3] for s in samples if s[0] == 0) == sorted(n for row in lengths for n in row)
    made = [(e.move, tuple(e.workers)) for e in moved.record.events if isinstance(e, MoveMade) and e.step == 0]
    assert [move for move in made if move[0] != "order"] == [
        ("place", (0,)), ("spread", (0, 1, 2)), ("merge", (1,)), ("spread", (0, 2))
    ]  # fmt: skip
    assert {s.worker for s in moved.record.sequences("a") if s.tokens == 150} == {0, 2}
    ended = [e for e in moved.record.events if isinstance(e, MoveEnded)]
    assert len(ended) == 6
    assert all(e.refused is None for e in ended)


def test_a_placed_rollout_is_planned_with_the_speeds_of_its_own_workers(tmp_path, monkeypatch):
    """The first step is on all workers, of which the last is the slowest, the others on that one alone."""
    lengths = [[20, 60, 9, 100], [100, 7, 30, 30], [12, 90, 40, 4], [20, 20, 20, 20]]
    slow = replace(COSTS, decode=DecodeCosts(base_s=0.05, per_sequence_s=0.001, per_prompt_token_s=1e-4))
    move_about(monkeypatch, (2,), since=2)
    job = pipeline(rollout__prompts=4, rollout__order="oracle", rollout__tp=1, steps=4, checkpoint__every=100)
    run = simulate({"a": job}, lengths, tmp_path, workers=3, costs=lambda worker, _: slow if worker == 2 else COSTS)
    steps, placed = run.record.steps("a"), 3
    assert steps[placed]["rollout_predicted_s"] == pytest.approx(steps[placed]["rollout_s"], rel=0.05)
    orders = [e for e in run.record.events if isinstance(e, MoveMade) and e.move == "order"]
    assert [e.workers for e in orders] == [[0, 1, 2], [0, 1, 2], [2], [2]]


def test_workers_that_have_no_part_in_a_rollout_do_not_wait_for_it(tmp_path, monkeypatch):
    lengths = [[20, 60, 9, 100]] * 4
    move_about(monkeypatch, (1,))
    run = simulate({"a": pipeline(rollout__prompts=4, rollout__tp=1, steps=1)}, lengths, tmp_path, workers=3)
    metrics = run.record.steps("a")[0]
    assert metrics["rollout_idle_s"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["rollout_s"] > 1.0
