"""Sharing changes nothing learned: whatever policy or planner decides about pipelines that share workers, each of them
has the same tokens, rewards, losses and weights as alone, to the last bit."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e.harness import Outcome, run_inline, small_pipeline
from longtail.cluster.messages import Shares
from longtail.core.config import Pipeline, SharingPolicy
from longtail.core.events import (
    MoveEnded,
    MoveMade,
    Planned,
    Progress,
    RunEnded,
    RunStarted,
    Span,
    StageEntered,
    WorkerLost,
)
from longtail.observe.moves import EVERY_STEP, KINDS
from longtail.observe.summary import summarise
from longtail.planner.state import ClusterState, Mode, PipelineState, Relocation, Sharing, Stage
from planner.rollouts import table

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
NOT_LEARNED = re.compile(r".*_s$|slowdown|switches|preemptions|length_tau")
"""Metrics that say how long things took, and by which way."""


COSTS = table(
    {1: (2e-3, 4e-4, 1e-7), 2: (1.2e-3, 2.5e-4, 6e-8), 3: (1e-3, 2e-4, 5e-8)}, handshake_s=1e-3, move_s=1e-4, kv_heads=4
)
"""Not of this machine; some are wrong by far, and it must not matter."""


def long_tailed(folder: Path) -> dict[str, Any]:
    """In fixed-length mode: few responses are far longer than the others."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[rng.choice([2, 4, 6, 9, rng.randint(50, 110)]) for _ in range(8)] for _ in range(8)]
    data = [{"prompt": f"reverse {i}:", "lengths": row} for i, row in enumerate(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return {
        "task": "rows.jsonl", "reward": "sharing_rewards:vowels", "rollout__forced_lengths": "lengths",
        "rollout__prompts": 4, "rollout__max_tokens": 120, "steps": 2,
    }  # fmt: skip


def pairs(folder: Path, *, tp: int | str = 1) -> dict[str, dict[str, Pipeline]]:
    """Pipelines that differ in what they sample, in group sizes, data types, iterations and length. ``tp`` as alone or
    in company: it changes no bit either."""
    tails = small_pipeline(**long_tailed(folder), rollout__tp=tp)
    (folder / "sharing_rewards.py").write_text(
        "def vowels(prompts, completions, **columns):\n"
        "    return [float(sum(c in 'aeiou' for c in text)) for text in completions]\n"
        "def checksum(prompts, completions, **columns):\n"
        "    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )
    return {
        "tails and texts": {
            "a": tails,
            "b": small_pipeline(
                dtype="float32", seed=3, steps=3, algorithm__group_size=3, rollout__prompts=5, rollout__max_tokens=40,
                rollout__tp=tp,
            ),
        },
        "chains and passes": {
            "a": small_pipeline(
                task="collatz", reward="sharing_rewards:checksum", seed=5, algorithm__group_size=2, rollout__prompts=4,
                rollout__max_tokens=60, rollout__tp=tp,
            ),
            "b": small_pipeline(
                steps=2, algorithm__iterations=2, algorithm__group_size=6, rollout__prompts=2, train__micro_tokens=64,
                rollout__tp=tp,
            ),
        },
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _looked_at_all_the_time(monkeypatch, in_step):
    """It is decided anew whenever anything is heard of the workers."""
    monkeypatch.setattr("longtail.runtime.conductor.THINKING_SHARE", 0.0)
    monkeypatch.setattr("longtail.runtime.conductor.LOOK_EVERY_S", 0.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[..., Outcome]:
    """Each pipeline of a pair on its own, by number of workers."""
    runs: dict[tuple[str, str, int], Outcome] = {}

    def get(pair: str, name: str, workers: int = 2) -> Outcome:
        key = pair, name, workers
        if key not in runs:
            folder = tmp_path_factory.mktemp("alone")
            runs[key] = run_inline({name: pairs(folder)[pair][name]}, folder, workers=workers, base=folder)
        return runs[key]

    return get


def share(folder: Path, pair: str, policy: SharingPolicy, *, workers: int = 2, tp: int | str = 1, **options) -> Outcome:
    jobs = pairs(folder, tp=tp)[pair]
    return run_inline(jobs, folder, workers=workers, base=folder, policy=policy, costs=COSTS, **options)


def learned(outcome: Outcome, name: str) -> dict[int, dict[str, float]]:
    return {
        step: {metric: value for metric, value in metrics.items() if not NOT_LEARNED.fullmatch(metric)}
        for step, metrics in outcome.record.steps(name).items()
    }


def samples(outcome: Outcome, name: str) -> list[tuple]:
    return sorted(
        (s.step, s.prompt, s.sample, s.prompt_tokens, s.tokens, s.finish) for s in outcome.record.sequences(name)
    )


def assert_nothing_else_was_learned(together: Outcome, alone: Callable[..., Outcome], pair: str, *, workers: int = 2):
    for name, driver in together.controller.drivers.items():
        own = alone(pair, name, workers)
        assert driver.stage == "finished", driver.error
        steps, expected = learned(together, name), learned(own, name)
        assert steps.keys() == expected.keys()
        assert any(metrics.get("grad_norm", 0.0) > 0 for metrics in expected.values()), "nothing to compare"
        for step, metrics in expected.items():
            assert {"reward_mean", "loss", "tokens"} <= metrics.keys()
            # Time enters into one that is a rate.
            assert steps[step] | {"tokens_per_s": 0} == metrics | {"tokens_per_s": 0}, (name, step)
        weights, others = own.weights(name), together.weights(name)
        assert weights.keys() == others.keys()
        for key, tensor in weights.items():
            assert torch.equal(tensor, others[key]), (name, key)
    assert not [note for note in together.record.notes() if "Traceback" in note]


def assert_exactly_once(together: Outcome, alone: Callable[..., Outcome], pair: str) -> None:
    for name in together.controller.drivers:
        assert samples(together, name) == samples(alone(pair, name), name)


POLICIES = {
    "auto": SharingPolicy(),
    "auto, no merges": SharingPolicy(merge="off"),
    "auto, no groups": SharingPolicy(widen="off"),
    "auto, neither": SharingPolicy(merge="off", widen="off"),
    "greedy": SharingPolicy(corun="greedy"),
    "greedy, neither": SharingPolicy(corun="greedy", merge="off", widen="off"),
    "stages": SharingPolicy(corun="stages"),
    "serial": SharingPolicy(corun="serial"),
}


@pytest.mark.parametrize(
    ("policy", "pair"),
    [(policy, "tails and texts") for policy in POLICIES]
    + [(policy, "chains and passes") for policy in ("auto", "greedy", "stages")],
)
def test_under_every_policy_the_same_is_learned_as_alone(tmp_path, alone, policy, pair):
    together = share(tmp_path, pair, POLICIES[policy], tp="auto")
    assert_nothing_else_was_learned(together, alone, pair)
    assert_exactly_once(together, alone, pair)
    made = {e.move for e in together.record.events if isinstance(e, MoveMade)}
    if POLICIES[policy].merge == "off":
        assert not made & {"merge", "spread"}
    if POLICIES[policy].widen == "off":
        assert not made & {"widen", "narrow"}


# -- whatever a planner might decide ----------------------------------------------------------------------------


class Whims:
    """A planner without reason: places, merges, spreads and weighs at random, and has turns taken now and then."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, state: ClusterState, **options) -> Sharing:
        names = [p.name for p in state.pipelines]
        relocations = tuple(self._moved(p, state.workers) for p in state.pipelines if p.stage is Stage.ROLLOUT)
        return Sharing(
            mode=Mode.HOLD if self._rng.random() < 0.2 else Mode.SHARE,
            reason="a whim",
            begin={name: self._some(state.workers) for name in names},
            relocations=tuple(r for r in relocations if self._rng.random() < 0.5),
            weights={name: float(self._rng.uniform(0.2, 5.0)) for name in names},
            widens=frozenset(name for name in names if self._rng.random() < 0.3),
            rates=dict.fromkeys(names, 0.5),
        )

    def _some(self, workers: int) -> tuple[int, ...]:
        chosen = self._rng.choice(workers, size=int(self._rng.integers(1, workers + 1)), replace=False)
        return tuple(sorted(map(int, chosen)))

    def _moved(self, p: PipelineState, workers: int) -> Relocation:
        to = self._some(workers)
        kind = "spread" if len(to) > len(p.workers) else "merge"
        return Relocation(pipeline=p.name, kind=kind, to=to, reason="a whim", gain_s=1.0, cost_s=0.1, rest_s=1.0)


ANYTHING = SharingPolicy(max_merges=64)


def carried_out(outcome: Outcome) -> list[MoveEnded]:
    ended = [e for e in outcome.record.events if isinstance(e, MoveEnded)]
    return [e for e in ended if e.move in ("merge", "spread") and e.refused is None]


@pytest.mark.parametrize(("seed", "workers", "tp"), [(0, 2, 1), (1, 2, "auto"), (2, 3, 1)])
def test_no_decision_of_any_planner_changes_what_is_learned(tmp_path, alone, monkeypatch, seed, workers, tp):
    monkeypatch.setattr("longtail.runtime.conductor.share", Whims(seed))
    together = share(tmp_path, "tails and texts", ANYTHING, workers=workers, tp=tp)
    assert_nothing_else_was_learned(together, alone, "tails and texts", workers=workers)
    if tp == 1:  # a rollout in tensor-parallel groups cannot be moved
        assert any(e.moved_bytes > 0 or e.recomputed_tokens > 0 for e in carried_out(together))


def test_moves_and_weights_at_any_moment_change_nothing_that_is_learned(tmp_path, alone, monkeypatch):
    """Not between two looks of a planner, but whenever anything is heard from a worker."""
    rng = np.random.default_rng(0)

    def meddle(event, cluster, controller):
        if not isinstance(event, Span | Progress):
            return
        driver = controller.drivers[str(rng.choice(list(controller.drivers)))]
        to = (0, 1) if rng.random() < 0.4 else (int(rng.integers(2)),)
        kind = "spread" if len(to) == 2 else "merge"
        if not driver.over:
            driver.begin_on = to
            driver.relocate(
                Relocation(pipeline=driver.name, kind=kind, to=to, reason="now", gain_s=1.0, cost_s=0.1, rest_s=1.0)
            )
            weights = tuple((name, float(rng.uniform(0.2, 5.0))) for name in controller.drivers)
            cluster.send(int(rng.integers(2)), [Shares(weights=weights)])

    monkeypatch.setattr("longtail.runtime.controller.TURNS", {})
    together = share(tmp_path, "tails and texts", SharingPolicy(corun="serial", max_merges=64), on_event=meddle)
    assert_nothing_else_was_learned(together, alone, "tails and texts")
    assert_exactly_once(together, alone, "tails and texts")
    assert len(carried_out(together)) >= 2


def test_a_worker_that_dies_while_samples_are_moved_about_changes_nothing_that_is_learned(tmp_path, alone, monkeypatch):
    killed = []

    def kill_once(event, cluster, controller):
        if isinstance(event, MoveMade) and event.move in ("merge", "spread") and not killed:
            killed.append(event)
            cluster.kill(1)

    monkeypatch.setattr("longtail.runtime.conductor.share", Whims(5))
    together = share(tmp_path, "tails and texts", ANYTHING, on_event=kill_once)
    assert any(isinstance(e, WorkerLost) for e in together.record.events)
    assert_nothing_else_was_learned(together, alone, "tails and texts")


# -- turns ------------------------------------------------------------------------------------------------------


def stages(outcome: Outcome) -> list[tuple[str, str]]:
    """(pipeline, stage) in the order in which they were entered, of rollouts and trainings."""
    entered = [e for e in outcome.record.events if isinstance(e, StageEntered)]
    return [(e.pipeline, e.stage) for e in entered if e.stage in ("rollout", "train")]


def test_in_turns_by_step_whoever_samples_trains_next(tmp_path):
    entered = stages(share(tmp_path, "chains and passes", POLICIES["serial"]))
    rollouts, trainings = entered[::2], entered[1::2]
    assert [name for name, _ in rollouts] == [name for name, _ in trainings]
    assert {stage for _, stage in rollouts} == {"rollout"}
    assert {name for name, _ in entered} == {"a", "b"}


@pytest.mark.parametrize(("policy", "side_by_side"), [("stages", False), ("serial", False), ("greedy", True)])
def test_workers_sample_and_train_for_one_pipeline_at_a_time_where_turns_are_taken(tmp_path, policy, side_by_side):
    """By what workers did: the busy spans of the two pipelines, on both workers."""
    outcome = share(tmp_path, "tails and texts", POLICIES[policy])
    work = ("prefill", "decode", "train", "reduce")
    spans = [e for e in outcome.record.events if isinstance(e, Span) and e.substage in work]
    spans.sort(key=lambda span: span.start)
    overlaps = [a for a, b in pairwise(spans) if a.pipeline != b.pipeline and b.start < a.end]
    assert bool(overlaps) is side_by_side


# -- what is told of it -----------------------------------------------------------------------------------------


def test_what_a_shared_run_tells_is_documented_and_makes_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr("longtail.runtime.conductor.share", Whims(7))
    outcome = share(tmp_path, "tails and texts", ANYTHING, tp="auto")
    metrics = set(re.findall(r"^\| `(\w+)` \|", DOCS.partition("## Metrics of a step")[2], flags=re.MULTILINE))
    for name in "ab":
        for told in outcome.record.steps(name).values():
            assert told.keys() <= metrics
            assert {"alone_s", "slowdown", "wait_s"} <= told.keys()
            assert told["slowdown"] == pytest.approx(told["time_s"] / told["alone_s"], rel=0.01)
    made = {e.move for e in outcome.record.events if isinstance(e, MoveMade)}
    assert made <= {EVERY_STEP, *KINDS}
    plans = [e for e in outcome.record.events if isinstance(e, Planned)]
    assert plans
    assert all(set(plan.rates) <= {"a", "b"} and plan.duration_s >= 0 for plan in plans)

    events = outcome.record.events
    start = RunStarted(t=events[0].t, run="r", version="0", workers=2, devices=["cpu"] * 2, pipelines=["a", "b"])
    summary = summarise([start, *events, RunEnded(t=events[-1].t, reason="finished")])
    steps = [told for name in "ab" for told in outcome.record.steps(name).values()]
    assert summary.together is None or summary.together == pytest.approx(
        sum(told["alone_s"] for told in steps) / (max(e.t for e in events if e.kind == "step") - first_start(outcome)),
        rel=0.2,
    )
    assert all(0 <= p.idle_filled <= 1 for p in summary.pipelines)
    assert {kind for p in summary.pipelines for kind in p.moves} <= set(KINDS)
    merged = sum(p.moves["merge"].count for p in summary.pipelines if "merge" in p.moves)
    assert merged == sum(e.move == "merge" for e in carried_out(outcome))


def first_start(outcome: Outcome) -> float:
    return min(e.t for e in outcome.record.events if isinstance(e, StageEntered) and e.stage == "rollout")
