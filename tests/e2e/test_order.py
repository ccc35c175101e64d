"""Where and when a prompt is sampled changes how long a step takes, and nothing else."""

from __future__ import annotations

import json
import random

import pytest
import torch

from e2e.harness import Outcome, run_inline, small_pipeline
from longtail.core.events import MoveMade


def assert_same_learning(one: Outcome, other: Outcome) -> None:
    mine, theirs = one.record.steps("a"), other.record.steps("a")
    assert mine.keys() == theirs.keys()
    for step, metrics in mine.items():
        for name in ("reward_mean", "reward_std", "loss", "grad_norm", "tokens", "length_max"):
            assert metrics[name] == theirs[step][name], (step, name)
    tokens = [{(s.step, s.prompt, s.sample): s.tokens for s in run.record.sequences("a")} for run in (one, other)]
    assert tokens[0] == tokens[1]
    for name, tensor in one.weights("a").items():
        assert torch.equal(tensor, other.weights("a")[name]), name


def test_order_changes_no_token_and_no_weight(tmp_path):
    job = {"task": "collatz", "rollout__prompts": 5, "rollout__max_tokens": 40, "rollout__max_running": 4, "steps": 2}
    fifo, ranked = (
        run_inline({"a": small_pipeline(**job, rollout__order=order)}, tmp_path / order, workers=2)
        for order in ("fifo", "ranked")
    )
    assert_same_learning(fifo, ranked)
    moves = [e for e in ranked.record.events if isinstance(e, MoveMade)]
    assert [m.step for m in moves] == [0, 1]
    assert not any(isinstance(e, MoveMade) for e in fifo.record.events)


def test_with_forced_lengths_the_oracle_too_changes_nothing(tmp_path):
    rng = random.Random(0)
    rows = [{"prompt": f"reverse {i}:", "lengths": [rng.randint(1, 24) for _ in range(8)]} for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "order_rewards.py").write_text(
        "def vowels(prompts, completions, **columns):\n"
        "    return [float(sum(c in 'aeiou' for c in text)) for text in completions]\n"
    )
    job = {"task": "rows.jsonl", "reward": "order_rewards:vowels", "rollout__max_running": 3, "rollout__prompts": 5}
    runs = {
        order: run_inline(
            {"a": small_pipeline(**job, rollout__order=order, rollout__forced_lengths="lengths")},
            tmp_path / order,
            workers=2,
            base=tmp_path,
        )
        for order in ("fifo", "ranked", "oracle")
    }
    for order in ("ranked", "oracle"):
        assert_same_learning(runs["fifo"], runs[order])
    lengths = {(s.step, s.prompt, s.sample): s.tokens for s in runs["oracle"].record.sequences("a")}
    # 15 prompts in three steps: each row of the first epoch has its first four lengths, then its last four.
    taken = sorted(tuple(lengths[step, p, s] for s in range(4)) for step in range(3) for p in range(5))
    epochs = [tuple(row["lengths"][4 * epoch :][:4]) for epoch in (0, 1) for row in rows]
    assert [t for t in epochs if t not in taken] == []


@pytest.mark.parametrize("order", ["fifo", "ranked"])
def test_fewer_prompts_than_workers_are_split_under_every_order(tmp_path, order):
    one = run_inline({"a": small_pipeline(rollout__prompts=1)}, tmp_path / "one", workers=1)
    job = small_pipeline(rollout__prompts=1, rollout__order=order)
    three = run_inline({"a": job}, tmp_path / "three", workers=3)
    assert {s.worker for s in three.record.sequences("a")} == {0, 1, 2}
    assert one.record.steps("a")[0]["tokens"] == three.record.steps("a")[0]["tokens"]
