"""A job service over a controller that only says what it was asked for, and what its jobs would say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtail.core.events import PipelineEnded, PipelineStarted, StageEntered, StepEnded
from longtail.jobs.board import Board
from longtail.jobs.halves import cluster_file
from longtail.jobs.ledger import Ledger
from longtail.jobs.record import Record
from longtail.jobs.rules import AllowList
from longtail.jobs.service import JobService
from longtail.runtime.machine import Machine
from longtail.runtime.memory import PROCESS_BYTES

GIB = 1 << 30
JOB = """\
pipelines:
  NAME:
    model: tiny
    task: reverse-text
    algorithm: {group_size: 2}
    rollout: {prompts: 2, max_tokens: 8}
    steps: 3
"""


def job(name: str, more: str = "") -> str:
    return JOB.replace("NAME", name) + "".join(f"    {line}\n" for line in more.splitlines())


@dataclass(frozen=True)
class Plan:
    """Of a pipeline's plan, what the service and the fake look at."""

    name: str
    config: Any
    kv_blocks: int


@dataclass
class FakeController:
    """``play(name, ...)`` lets a job say what it does; ``refusal`` is what :meth:`submit` raises, if anything."""

    board: Board
    plans: list[Plan] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    refusal: str | None = None

    def submit(self, *plans: Any) -> None:
        if self.refusal is not None:
            raise ValueError(self.refusal)
        self.plans.extend(plans)

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def begin(self, name: str, *, step: int = 0, steps: int = 3) -> None:
        self.board.write(StageEntered(pipeline=name, step=step, stage="load"))
        started = PipelineStarted(pipeline=name, step=step, steps=steps, model="tiny", task="t", parameters=1)
        self.board.write(started)
        self.board.write(StageEntered(pipeline=name, step=step, stage="rollout"))

    def step(self, name: str, step: int, reward: float = 0.5) -> None:
        self.board.write(StepEnded(pipeline=name, step=step, metrics={"reward_mean": reward, "time_s": 1.0}))
        self.board.write(StageEntered(pipeline=name, step=step + 1, stage="rollout"))

    def end(self, name: str, reason: str = "finished", *, step: int = 3, error: str | None = None) -> None:
        self.board.write(PipelineEnded(pipeline=name, step=step, reason=reason, error=error))


@dataclass
class Bench:
    """``loaded`` and ``forgotten`` are names of which rewards would have been loaded, and let go."""

    service: JobService
    controller: FakeController
    board: Board
    ledger: Ledger
    folder: Path
    loaded: list[str]
    forgotten: list[str]


def bench(
    tmp_path: Path,
    *,
    allow: tuple[str, ...] = (),
    free_gib: float = 8.0,
    workers: int = 1,
    rehearse: Any = lambda job_file, name: None,
    load: Any = None,
) -> Bench:
    """A service in ``tmp_path / 'run'``, its jobs folder ``tmp_path / 'jobs'``; both are kept between calls.

    ``load`` is called where rewards would be loaded.
    """
    folder, jobs_dir = tmp_path / "run", tmp_path / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    jobs_dir.mkdir(exist_ok=True)
    cluster = cluster_file(None, name="lab", workers=workers)
    free = round(free_gib * GIB) * workers
    machine = Machine(cores=4, memory_bytes=free, free_bytes=free)
    board = Board()
    loaded: list[str] = []
    forgotten: list[str] = []
    controller = FakeController(board)
    ledger = Ledger(max(0, free // workers - PROCESS_BYTES), workers=workers)

    def plan(checked: Any, job_file: Any, name: str) -> Any:
        loaded.append(name)
        if load is not None:
            load(name)
        return Plan(name, job_file.jobs.pipelines[name], checked.pipelines[name].kv_blocks)

    service = JobService(
        cluster=cluster,
        machine=machine,
        jobs_dir=jobs_dir,
        folder=folder,
        allow=AllowList.of(allow),
        ledger=ledger,
        board=board,
        record=Record(folder),
        controller=controller,
        rehearse=rehearse,
        plan=plan,
        compile_for=lambda checked, job_file: None,
        forget=forgotten.append,
    )
    return Bench(service, controller, board, ledger, folder, loaded, forgotten)
