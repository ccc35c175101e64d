"""One `longtail run` of several pipelines, and what its events say of it.

Every pipeline does the same work in every arm: prompts, samples and lengths are given (forced lengths), rewards are a
function of the text, and all of them are trained on. What is measured begins when all pipelines are loaded, and ends
with the last step of the last one: all steps count, the first ones too, of which nothing is known before.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUP = 4
PATIENCE_S = 1800

REWARDS = '''
"""Rewards that differ from sample to sample, so that every group is trained on."""

import zlib


def spread(prompts, completions, **columns):
    return [zlib.crc32(text.encode()) % 97 / 97 for text in completions]
'''


@dataclass(frozen=True, kw_only=True)
class Job:
    """One pipeline: ``rows`` (each with a ``prompt`` and ``lengths``) are those of its ``steps`` steps, in order of
    steps, ``prompts`` in each."""

    name: str
    model: str
    rows: Sequence[dict[str, Any]]
    prompts: int
    steps: int
    seed: int
    cap: int
    kv_gib: float
    micro_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Of all steps."""
        return self.steps * self.prompts * GROUP


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run came to. ``seconds``: of the window that is measured. ``steps_s``: of each pipeline, the seconds of
    each step. ``busy``: share of the workers' time, while every pipeline had work, in which they worked;
    ``busy_later``: once each has done a step, before which nothing is known of it. ``learned``: a digest of each
    pipeline's losses, rewards and final weights. ``train_token_s``: of each pipeline, busy seconds of training per
    token: the same work in every arm, so it says how fast the machine was."""

    seconds: float
    steps_s: dict[str, list[float]]
    busy: float
    busy_later: float
    learned: dict[str, str]
    moves: dict[str, dict[str, int]]
    metrics: dict[str, list[dict[str, float]]]
    planned: list[Any]
    mean_rewards: dict[str, float]
    train_token_s: dict[str, float]


def run(
    jobs: Sequence[Job], folder: Path, *, policy: Mapping[str, Any], tp: Any, costs: Path, workers: int = 2
) -> Outcome:
    """Raises ``RuntimeError`` with what the run printed if it fails."""
    write(jobs, folder, policy=policy, tp=tp, costs=costs, workers=workers)
    log = folder / "output.txt"
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "longtail", "run", "jobs.yaml"],
            cwd=folder, stdout=output, stderr=output, check=False, timeout=PATIENCE_S,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"longtail run ended with {done.returncode}:\n{log.read_text()[-6000:]}")
    return outcome(jobs, folder / "runs" / "jobs", workers)


def write(jobs: Sequence[Job], folder: Path, *, policy: Mapping[str, Any], tp: Any, costs: Path, workers: int) -> None:
    """``jobs.yaml`` in the new ``folder``, the tasks' rows and the rewards."""
    import yaml

    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text(REWARDS.lstrip())
    pipelines = {}
    for job in jobs:
        write_rows(job, folder)
        pipelines[job.name] = {
            "model": job.model, "task": f"{job.name}.jsonl", "reward": "rewards:spread",
            "rollout": {
                "prompts": job.prompts, "max_tokens": job.cap, "kv_gib": job.kv_gib, "tp": tp,
                "forced_lengths": "lengths", "prompt_format": "plain",
            },
            "algorithm": {"group_size": GROUP}, "train": {"lr": 1e-6, "micro_tokens": job.micro_tokens},
            "checkpoint": {"every": 10_000}, "steps": job.steps, "seed": job.seed, **job.extra,
        }  # fmt: skip
    record = {"workers": workers, "costs": str(costs), "policy": dict(policy), "pipelines": pipelines}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(record))


def write_rows(job: Job, folder: Path) -> None:
    """The rows in such an order that step k gets the k-th ones."""
    from longtail.rl.tasks import load_task, prompt_indices

    path = folder / f"{job.name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in job.rows))
    task = load_task(path.name, {}, seed=job.seed, base=folder)
    placed: list[dict[str, Any]] = [{}] * len(job.rows)
    for step in range(job.steps):
        places = prompt_indices(task, step=step, prompts=job.prompts, seed=job.seed)
        for place, row in zip(places, job.rows[step * job.prompts :], strict=False):
            placed[place] = row
    path.write_text("".join(json.dumps(row) + "\n" for row in placed))


def outcome(jobs: Sequence[Job], run_folder: Path, workers: int) -> Outcome:
    from longtail.observe.store import read_events

    events = list(read_events(run_folder))
    ends = {job.name: [e for e in events if e.kind == "step" and e.pipeline == job.name] for job in jobs}
    begin = max(e.t for e in events if e.kind == "pipeline_started")
    end = max(steps[-1].t for steps in ends.values())
    first_over = min(steps[-1].t for steps in ends.values())
    spans = [e for e in events if e.kind == "span"]
    known = max(steps[0].t for steps in ends.values())
    return Outcome(
        seconds=end - begin,
        steps_s={name: [min(s.metrics["time_s"], s.t - begin) for s in steps] for name, steps in ends.items()},
        busy=busy(spans, begin, first_over, workers),
        busy_later=busy(spans, known, first_over, workers),
        learned={job.name: digest(job, run_folder, ends[job.name]) for job in jobs},
        moves={job.name: count_moves(events, job.name) for job in jobs},
        metrics={name: [s.metrics for s in steps] for name, steps in ends.items()},
        planned=[e for e in events if e.kind == "planned"],
        mean_rewards={name: sum(s.metrics["reward_mean"] for s in steps) / len(steps) for name, steps in ends.items()},
        train_token_s={job.name: train_token_s(spans, job.name) for job in jobs},
    )


def busy(spans: Sequence[Any], begin: float, end: float, workers: int) -> float:
    return sum(s.busy_s * overlap(s, begin, end) for s in spans) / (workers * max(end - begin, 1e-9))


def train_token_s(spans: Sequence[Any], pipeline: str) -> float:
    own = [s for s in spans if s.pipeline == pipeline and s.substage == "train"]
    return sum(s.busy_s for s in own) / sum(s.tokens for s in own)


def overlap(span: Any, begin: float, end: float) -> float:
    """The share of a span that lies within the window."""
    if span.end <= span.start:
        return float(begin <= span.start <= end)
    return max(0.0, min(span.end, end) - max(span.start, begin)) / (span.end - span.start)


def count_moves(events: Sequence[Any], pipeline: str) -> dict[str, int]:
    kinds = [e.move for e in events if e.kind == "move" and e.pipeline == pipeline and e.move != "order"]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def digest(job: Job, run_folder: Path, steps: Sequence[Any]) -> str:
    """Of all that was learned: each step's loss and reward, and the bytes of the final weights."""
    from longtail.rl.checkpoint import latest

    found = hashlib.blake2b(digest_size=8)
    found.update(repr([(s.step, s.metrics["loss"], s.metrics["reward_mean"]) for s in steps]).encode())
    path = latest(run_folder / job.name).path
    assert path is not None, "the last step is always saved"
    for file in sorted(path.glob("*.safetensors")):
        if file.name.startswith("model"):
            found.update(file.read_bytes())
    return found.hexdigest()
