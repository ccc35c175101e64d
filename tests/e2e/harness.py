"""Runs pipelines on an in-process cluster: the real controller, workers, rewards and checkpoints, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from inline_cluster import InlineCluster
from longtail.core.config import Pipeline, SharingPolicy
from longtail.core.events import Event, Note, SequenceEnded, StepEnded
from longtail.costs.interference import UNKNOWN, Interference
from longtail.costs.table import CostTable, TableKey
from longtail.engine.checkpoint import check_model
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer
from longtail.rl.reward_pool import RewardPool, RewardSpec
from longtail.rl.tasks import load_task
from longtail.runtime.controller import Controller
from longtail.runtime.plan import PipelinePlan


@dataclass
class Recorder:
    """A sink that keeps everything, and may do something on an event."""

    on_event: Callable[[Event], None] = lambda event: None
    events: list[Event] = field(default_factory=list)

    def write(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def close(self) -> None:
        pass

    def steps(self, pipeline: str) -> dict[int, dict[str, float]]:
        """Metrics by step; after a rollback the last word counts."""
        return {e.step: e.metrics for e in self.events if isinstance(e, StepEnded) and e.pipeline == pipeline}

    def sequences(self, pipeline: str) -> list[SequenceEnded]:
        return [e for e in self.events if isinstance(e, SequenceEnded) and e.pipeline == pipeline]

    def notes(self) -> list[str]:
        return [e.message for e in self.events if isinstance(e, Note)]


def small_pipeline(**changes: Any) -> Pipeline:
    """A quick job on the tiny model in float64 (where results do not depend on batching); nested keys by ``__``."""
    values: dict[str, Any] = {
        "model": "tiny",
        "task": "reverse-text",
        "dtype": "float64",
        "steps": 3,
        "algorithm": {"group_size": 4},
        "rollout": {"prompts": 3, "max_tokens": 24, "tp": 1},
        "train": {"lr": 1e-3, "micro_tokens": 256},
        "checkpoint": {"every": 1},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        if section:
            values[section] = {**values.get(section, {}), name: value}
        else:
            values[name] = value
    return Pipeline.model_validate(values)


@dataclass
class Outcome:
    controller: Controller
    record: Recorder
    cluster: InlineCluster

    def weights(self, pipeline: str) -> dict[str, torch.Tensor]:
        path = self.controller.drivers[pipeline].saver.last_path
        assert path is not None
        return load_file(path / "model.safetensors")


def run_inline(
    jobs: dict[str, Pipeline],
    folder: Path,
    *,
    workers: int = 1,
    kv_blocks: int = 2000,
    base: Path | None = None,
    on_event: Callable[[Event, InlineCluster, Controller], None] | None = None,
    communicator: str = "auto",
    policy: SharingPolicy | None = None,
    costs: CostTable | None = None,
) -> Outcome:
    """Run ``jobs`` to their end in ``folder``; ``on_event`` may kill workers or interrupt. With a ``policy`` they share
    the workers by it; ``costs`` is then believed of all (None: costs are measured)."""
    cluster = InlineCluster(workers, communicator=communicator)
    rewards = RewardPool(processes=1, log_path=folder / "rewards.log")
    record = Recorder()
    try:
        plans = [plan(name, job, folder, kv_blocks, rewards, base or folder) for name, job in jobs.items()]
        if policy is not None:
            plans = [shared(p, policy, costs, company=len(jobs) > 1 and workers > 1) for p in plans]
        controller = Controller(cluster, plans, rewards=rewards, sink=record, policy=policy or SharingPolicy())
        if on_event is not None:
            record.on_event = lambda event: on_event(event, cluster, controller)
        controller.run()
    finally:
        cluster.close()
        rewards.close()
    return Outcome(controller, record, cluster)


@dataclass
class KnownTable:
    """See ``longtail.runtime.plan.Tables``."""

    table: CostTable | None

    def find(self) -> CostTable | None:
        return self.table

    def keep(self, table: CostTable) -> None:
        self.table = table

    def pairs(self, keys: Iterable[TableKey]) -> Interference:
        return UNKNOWN


def shared(plan: PipelinePlan, policy: SharingPolicy, costs: CostTable | None, *, company: bool) -> PipelinePlan:
    """As ``longtail run`` plans a pipeline in ``company``, or one that has the workers to itself."""
    return replace(
        plan,
        tables=KnownTable(costs),
        company=company and policy.corun == "auto",
        max_merges=policy.max_merges if policy.merge == "auto" else 0,
        may_widen=policy.widen == "auto",
    )


def plan(name: str, job: Pipeline, folder: Path, kv_blocks: int, rewards: RewardPool, base: Path) -> PipelinePlan:
    model_folder = resolve_model(job.model)
    heads = check_model(model_folder).kv_heads
    rewards.open(
        name,
        RewardSpec(
            task=job.task,
            task_args=job.task_args,
            seed=job.seed,
            rewards=tuple(job.rewards),
            base=base,
            timeout_s=job.reward_timeout_s,
        ),
    )
    return PipelinePlan(
        name=name,
        config=job,
        model_folder=model_folder,
        folder=folder / name,
        kv_blocks=kv_blocks,
        task=load_task(job.task, job.task_args, seed=job.seed, base=base),
        tokenizer=Tokenizer.load(model_folder),
        kv_heads=heads,
    )
