"""The real controller on simulated workers, with pipelines that come, go, fail and are stopped while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from e2e.harness import Recorder
from longtail.cluster.simulated import SimulatedCluster
from longtail.core.config import Pipeline, SharingPolicy
from longtail.core.errors import RewardError
from longtail.core.events import Event, PipelineEnded, PipelineStarted, Rollback, SequenceEnded
from longtail.costs.table import CostTable
from longtail.costs.worker import WorkerCosts
from longtail.rl.tasks import Example
from longtail.runtime.controller import Controller
from longtail.runtime.instant_rewards import InstantRewards
from longtail.runtime.plan import PipelinePlan
from simulated_run import COSTS, Known, Letters, Rows


class FailingRewards(InstantRewards):
    """Instant, but the reward function of a pipeline in ``fails_at`` raises in that step."""

    def __init__(self, fails_at: Mapping[str, int]) -> None:
        super().__init__()
        self._fails_at = fails_at

    def submit(self, pipeline: str, *, step: int, **arguments: Any) -> Future[list[float | None]]:
        if self._fails_at.get(pipeline) != step:
            return super().submit(pipeline, step=step, **arguments)
        future: Future[list[float | None]] = Future()
        future.set_exception(RewardError(f"{pipeline}: the reward function raised ValueError: no"))
        return future


class BrokenRows(Rows):
    """A task whose code raises from its example ``first`` on."""

    first = 0

    def example(self, index: int) -> Example:
        if index >= self.first:
            raise ZeroDivisionError(f"there is no example {index}")
        return super().example(index)


class World:
    """A cluster, a controller and a record of all that happens. ``on_event`` is told first.

    With ``ends_after`` pipelines the controller keeps running until so many have ended.
    """

    def __init__(
        self,
        folder: Path,
        jobs: Mapping[str, Pipeline] | None = None,
        *,
        lengths: Sequence[Sequence[int]] = ((20, 20, 20, 20),) * 8,
        workers: int = 2,
        policy: SharingPolicy | None = None,
        ends_after: int | None = None,
        fails_at: Mapping[str, int] | None = None,
        costs: WorkerCosts = COSTS,
        table: CostTable | None = None,
        patience_s: float = 20_000.0,
    ) -> None:
        self.folder, self.lengths, self._table, self._costs = folder, lengths, table, costs
        self.cluster = SimulatedCluster(
            workers,
            costs=lambda worker, pipeline: costs,
            lengths=lambda pipeline, step, request: [10] * request.samples,
            start_s=1.0,
            alive_s=0.4,
        )
        self.record = Recorder(on_event=self._on_event)
        self.on_event: Callable[[Event], None] = lambda event: None
        self.ended: list[str] = []
        self._ends_after = ends_after
        self.controller = Controller(
            self.cluster,
            [self.plan(name, job) for name, job in (jobs or {}).items()],
            rewards=FailingRewards(fails_at or {}),
            sink=self.record,
            clock=self.cluster.clock,
            policy=policy or SharingPolicy(corun="greedy"),
            keep_running=ends_after is not None,
        )
        self.cluster.later(patience_s, self._give_up)

    def plan(self, name: str, job: Pipeline, **changes: Any) -> PipelinePlan:
        values = {
            "name": name, "config": job, "model_folder": self.folder, "folder": self.folder / name, "kv_blocks": 1,
            "task": Rows(self.lengths), "tokenizer": Letters(), "kv_heads": self._costs.kv_heads,
            "tables": Known(self._table),
        }  # fmt: skip
        return PipelinePlan(**(values | changes))

    def submit(self, name: str, job: Pipeline, **changes: Any) -> None:
        self.controller.submit(self.plan(name, job, **changes))

    def run(self) -> World:
        self.controller.run()
        self.cluster.close()
        return self

    def stage(self, name: str) -> str:
        return self.controller.outcomes()[name].stage

    def _on_event(self, event: Event) -> None:
        self.on_event(event)
        if isinstance(event, PipelineEnded):
            self.ended.append(event.pipeline)
            if len(self.ended) == self._ends_after:
                self.controller.interrupt()

    def _give_up(self) -> None:
        stages = {name: (driver.stage, driver.step) for name, driver in self.controller.drivers.items()}
        raise AssertionError(f"no end in sight: {stages}")

    def samples(self) -> dict[str, set[tuple[int, int, int]]]:
        """By pipeline (step, prompt, sample) of all that have ended, but for what was begun anew; each once."""
        found: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
        for event in self.record.events:
            if isinstance(event, Rollback | PipelineStarted):
                found[event.pipeline] = {key for key in found[event.pipeline] if key[0] < event.step}
            elif isinstance(event, SequenceEnded):
                key = event.step, event.prompt, event.sample
                assert key not in found[event.pipeline], f"sample {key} of {event.pipeline} ended twice"
                found[event.pipeline].add(key)
        return found


def all_samples(job: Pipeline, steps: int | None = None) -> set[tuple[int, int, int]]:
    return {
        (step, prompt, sample)
        for step in range(job.steps if steps is None else steps)
        for prompt in range(job.rollout.prompts)
        for sample in range(job.algorithm.group_size)
    }
