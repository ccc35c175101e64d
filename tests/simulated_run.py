"""The real controller, drivers and planner on simulated workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from e2e.harness import KnownTable as Known
from e2e.harness import Recorder
from longtail.cluster.simulated import SimulatedCluster
from longtail.core.config import Pipeline
from longtail.core.events import Event
from longtail.core.types import Request
from longtail.costs.decode import DecodeCosts
from longtail.costs.table import CostTable, SwitchCosts
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
WIDE = replace(
    COSTS,
    decode_by_degree={
        2: DecodeCosts(base_s=0.006, per_sequence_s=0.0008, per_prompt_token_s=6e-5),
        4: DecodeCosts(base_s=0.004, per_sequence_s=0.0007, per_prompt_token_s=4e-5),
    },
    switch=SwitchCosts(handshake_s=0.003, move_s=0.001, move_byte_s=1e-9),
    kv_heads=4,
    kv_bytes=4096,
)
"""The same for tensor-parallel groups too."""


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
    table: CostTable | None = None,
    alive_s: float = 0.05,
    on_event: Callable[[Event, SimulatedCluster, Controller], None] | None = None,
) -> Simulated:
    """Run ``jobs`` to their end on prompts with these ``lengths`` (one row each); ``table`` are costs as measured."""
    cluster = SimulatedCluster(
        workers,
        costs=costs,
        lengths=natural or (lambda pipeline, step, request: [10] * request.samples),
        alive_s=alive_s,
    )
    record = Recorder()
    plans = [
        PipelinePlan(
            name=name, config=job, model_folder=folder, folder=folder / name, kv_blocks=1, task=Rows(lengths),
            tokenizer=Letters(), ranker=ranker, kv_heads=costs(0, name).kv_heads, tables=Known(table),
        )
        for name, job in jobs.items()
    ]  # fmt: skip
    controller = Controller(cluster, plans, rewards=InstantRewards(), sink=record, clock=cluster.clock)
    if on_event is not None:
        record.on_event = lambda event: on_event(event, cluster, controller)
    controller.run()
    cluster.close()
    return Simulated(controller, record, cluster, folder)
