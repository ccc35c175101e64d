"""One `longtail run` in which several arms take turns, step by step.

Each arm is a pipeline of its own, with the same model, data and seed, and only one of them works at a time: the reward
of an arm's first prompt is not given before it is that arm's turn, so that until then the arm rests after its rollout.
Whatever else the machine does meets all arms alike.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUP = 2
PATIENCE_S = 300.0
"""A run that says nothing for longer is not going to end."""
SAMPLING = ("prefill", "decode", "switch")

GATES = '''
"""Rewards of 0; those of a step's first prompt come when the file HERE/go/ARM-STEP is there."""

import time
from pathlib import Path

GO = Path(__file__).parent / "go"


def gate(arm):
    def reward(prompts, completions, gate, **columns):
        while gate[0] >= 0 and not (GO / f"{arm}-{gate[0]}").exists():
            time.sleep(0.03)
        return [0.0] * len(completions)

    return reward


'''


@dataclass
class ArmStep:
    """One step of one arm.

    ``busy`` is the share of all workers' time in the rollout in which they sampled (waiting for each other inside a
    group included), ``switch_s`` what a worker spent in switches, with the one back after the rollout; ``moves`` and
    ``ends`` are events.
    """

    rollout_s: float
    switch_s: float
    busy: float
    preemptions: int
    moves: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all arms of a run do: ``prompts`` of ``rows`` (each with a ``prompt`` and ``lengths``) in each of ``steps``
    steps, which use up all rows. ``rollout`` is that section of the job file, but for what is said here."""

    model: str
    rows: Sequence[dict[str, Any]]
    prompts: int
    steps: int
    seed: int
    rollout: Mapping[str, Any]
    communicator: str
    costs: Path
    workers: int = 2


def run_in_turns(work: Work, tp: Mapping[str, Any], folder: Path) -> dict[str, list[ArmStep]]:
    """Every step of each arm; ``tp`` is the ``rollout.tp`` of each. The first step is for warming up: all arms do it at
    the same time. Raises ``RuntimeError`` with what the run printed if it fails."""
    write_job(work, tp, folder)
    with Run(folder) as run:
        for arm in tp:
            run.wait_for_rollout(arm, 0)
        for step in range(1, work.steps):
            turn = step % len(tp)
            for arm in [*tp][turn:] + [*tp][:turn]:
                (folder / "go" / f"{arm}-{step - 1}").touch()
                run.wait_for_rollout(arm, step)
        for arm in tp:
            (folder / "go" / f"{arm}-{work.steps - 1}").touch()
        for arm in tp:
            run.wait_for("step", arm, work.steps - 1)
    return {arm: [arm_step(run.events, arm, step, work.workers) for step in range(work.steps)] for arm in tp}


def write_job(work: Work, tp: Mapping[str, Any], folder: Path) -> None:
    """``jobs.yaml`` in the new ``folder``, the task's rows and the rewards."""
    import yaml

    (folder / "go").mkdir(parents=True)
    write_rows(work, folder)
    functions = "".join(f"{function_name(arm)} = gate({arm!r})\n" for arm in tp)
    (folder / "gates.py").write_text(GATES.lstrip() + functions)
    rollout = {
        **work.rollout, "prompts": work.prompts, "forced_lengths": "lengths", "prompt_format": "plain", "order": "fifo",
    }  # fmt: skip
    pipelines = {
        arm: {
            "model": work.model, "task": "rows.jsonl",
            "reward": f"gates:{function_name(arm)}", "reward_timeout_s": 3600.0,
            "rollout": {**rollout, "tp": degree}, "algorithm": {"group_size": GROUP},
            "train": {"lr": 1e-9, "micro_tokens": 256}, "checkpoint": {"every": 10_000},
            "steps": work.steps, "seed": work.seed,
        }
        for arm, degree in tp.items()
    }  # fmt: skip
    jobs = {
        "workers": work.workers, "communicator": work.communicator, "costs": str(work.costs), "pipelines": pipelines,
        "reward_processes": len(tp) + 1,  # one that no arm can block
    }  # fmt: skip
    (folder / "jobs.yaml").write_text(yaml.safe_dump(jobs))


def function_name(arm: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in arm)


def write_rows(work: Work, folder: Path) -> None:
    """``rows.jsonl``, in which the first prompt of each step has that step's number as its gate, all others -1."""
    from longtail.rl.tasks import load_task, prompt_indices

    path, gates = folder / "rows.jsonl", [-1] * len(work.rows)
    assert len(work.rows) == work.prompts * work.steps, "every row is used once"

    def write() -> None:
        lines = [json.dumps({**row, "gate": gate}) + "\n" for row, gate in zip(work.rows, gates, strict=True)]
        path.write_text("".join(lines))

    write()
    task = load_task("rows.jsonl", {}, seed=work.seed, base=folder)
    for step in range(work.steps):
        gates[prompt_indices(task, step=step, prompts=work.prompts, seed=work.seed)[0]] = step
    write()


class Run:
    """A `longtail run` of ``folder/jobs.yaml`` as a child process, and its events as they come.

    Leaving ends it, without a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._log = folder / "output.txt"
        self._events = folder / "runs" / "jobs" / "events.jsonl"
        self.events: list[Any] = []
        self._read = 0
        with self._log.open("w") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "longtail", "run", "jobs.yaml"], cwd=folder, stdout=log, stderr=log
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(2):  # the second one ends it at once
            if self._child.poll() is None:
                self._child.send_signal(signal.SIGINT)
                time.sleep(1.5)
        try:
            self._child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def wait_for_rollout(self, arm: str, step: int) -> None:
        self.wait_for("stage", arm, step, stage="score")

    def wait_for(self, kind: str, arm: str, step: int, **values: Any) -> None:
        wanted: dict[str, Any] = {"kind": kind, "pipeline": arm, "step": step, **values}
        deadline, seen = time.monotonic() + PATIENCE_S, 0
        while True:
            self._take()
            for event in self.events[seen:]:
                if all(getattr(event, name, None) == value for name, value in wanted.items()):
                    return
                if event.kind == "pipeline_ended" and event.reason != "finished":
                    self._fail(f"{event.pipeline} {event.reason}: {event.error}")
            if len(self.events) > seen:
                deadline, seen = time.monotonic() + PATIENCE_S, len(self.events)
            if self._child.poll() is not None:
                self._fail(f"longtail run ended with {self._child.returncode}")
            if time.monotonic() > deadline:
                self._fail(f"{wanted} did not come in {PATIENCE_S:.0f} s")
            time.sleep(0.05)

    def _take(self) -> None:
        """The whole lines that have been written since."""
        from longtail.core.events import EVENTS, from_record

        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        records = [json.loads(line) for line in whole.splitlines()]
        self.events += [from_record(record) for record in records if record["kind"] in EVENTS]

    def _fail(self, message: str) -> None:
        raise RuntimeError(f"{message}\n{self._log.read_text()[-6000:]}")


def arm_step(events: Sequence[Any], arm: str, step: int, workers: int) -> ArmStep:
    mine = [e for e in events if getattr(e, "pipeline", None) == arm and getattr(e, "step", None) == step]
    [metrics] = [e.metrics for e in mine if e.kind == "step"]
    spans = [e for e in mine if e.kind == "span" and e.substage in SAMPLING]
    return ArmStep(
        rollout_s=metrics["rollout_s"],
        switch_s=sum(s.busy_s for s in spans if s.substage == "switch") / workers,
        busy=sum(s.busy_s for s in spans) / (workers * metrics["rollout_s"]),
        preemptions=sum(e.preemptions for e in mine if e.kind == "sequence"),
        moves=[e for e in mine if e.kind == "move" and e.move != "order"],
        ends=[e for e in mine if e.kind == "move_ended"],
    )
