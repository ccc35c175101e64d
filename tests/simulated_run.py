"""The real controller, drivers and planner on simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from e2e.harness import Recorder
from longtail.cluster.simulated import SimulatedCluster
from longtail.core.config import Pipeline
from longtail.core.events import Event
from longtail.core.types import Request
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from longtail.rl.tasks import Example
from longtail.runtime.controller import Controller
from longtail.runtime.instant_rewards import InstantRewards
from longtail.runtime.plan import PipelinePlan, Ranks

COSTS = WorkerCosts(
    decode=DecodeCosts(base_s=0.01, per_sequence_s=0.001, per_prompt_token_s=1e-4),
    per_train_token_s=1e-4,
    update_s=0.5,
)


@dataclass
class Rows:
    """A task whose prompts are numbers and whose lengths stand in the column ``lengths``."""

    lengths: Sequence[Sequence[int]]
    name: str = "rows"
    score: None = None

    @property
    def size(self) -> int:
        return len(self.lengths)

    def example(self, index: int) -> Example:
        return Example(prompt=f"prompt {index}", columns={"lengths": list(self.lengths[index])})


class Letters:
    """A tokenizer of one token per letter."""

    end_token_ids = (0,)

    def encode_prompt(self, prompt, *, chat=None) -> np.ndarray:
        return np.arange(1, len(prompt) + 1, dtype=np.int32)


@dataclass
class Simulated:
    controller: Controller
    record: Recorder
    cluster: SimulatedCluster
    folder: Path = field(repr=False)


def pipeline(**changes) -> Pipeline:
    """Nested keys by ``__``."""
    values: dict = {
        "model": "none",
        "task": "rows",
        "steps": 3,
        "algorithm": {"group_size": 4},
        "rollout": {"prompts": 8, "max_tokens": 200, "max_running": 4, "forced_lengths": "lengths"},
        "train": {"micro_tokens": 1000},
        "checkpoint": {"every": 2},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        if section:
            values[section] = {**values[section], name: value}
        else:
            values[name] = value
    return Pipeline.model_validate(values)


def simulate(
    jobs: dict[str, Pipeline],
    lengths: Sequence[Sequence[int]],
    folder: Path,
    *,
    workers: int = 2,
    costs: Callable[[int, str], WorkerCosts] = lambda worker, pipeline: COSTS,
    natural: Callable[[str, int, Request], Sequence[int]] | None = None,
    ranker: Ranks | None = None,
    on_event: Callable[[Event, SimulatedCluster, Controller], None] | None = None,
) -> Simulated:
    """Run ``jobs`` to their end on prompts with these ``lengths`` (one row each)."""
    cluster = SimulatedCluster(
        workers, costs=costs, lengths=natural or (lambda pipeline, step, request: [10] * request.samples)
    )
    record = Recorder()
    plans = [
        PipelinePlan(
            name=name, config=job, model_folder=folder, folder=folder / name, kv_blocks=1, task=Rows(lengths),
            tokenizer=Letters(), ranker=ranker,
        )
        for name, job in jobs.items()
    ]  # fmt: skip
    controller = Controller(cluster, plans, rewards=InstantRewards(), sink=record, clock=cluster.clock)
    if on_event is not None:
        record.on_event = lambda event: on_event(event, cluster, controller)
    controller.run()
    cluster.close()
    return Simulated(controller, record, cluster, folder)
