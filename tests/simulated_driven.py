"""Simulated workers without a controller: a test gives the commands and looks at what is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.engine_models import prompt_of, request
from longtail.cluster.messages import (
    Command,
    Connect,
    Generate,
    Happened,
    OpenPipeline,
    Report,
    Sampled,
    Stop,
    Switch,
    Update,
)
from longtail.cluster.simulated import SimulatedCluster
from longtail.core.config import Pipeline
from longtail.core.events import Span
from longtail.core.types import Lease, Request, SubStage
from longtail.costs.decode import DecodeCosts
from longtail.costs.table import SwitchCosts
from longtail.costs.worker import WorkerCosts

NARROW = DecodeCosts(base_s=0.02, per_sequence_s=0.002, per_context_token_s=1e-5, per_prompt_token_s=2e-3)
PAIR = DecodeCosts(base_s=0.012, per_sequence_s=0.0015, per_context_token_s=6e-6, per_prompt_token_s=1.1e-3)
FOUR = DecodeCosts(base_s=0.009, per_sequence_s=0.0012, per_context_token_s=4e-6, per_prompt_token_s=0.7e-3)
COSTS = WorkerCosts(
    decode=NARROW,
    decode_by_degree={2: PAIR, 4: FOUR},
    switch=SwitchCosts(handshake_s=0.004, move_s=0.001, move_byte_s=1e-8),
    kv_heads=4,
    kv_bytes=1024,
    per_train_token_s=1e-4,
    update_s=0.1,
    load_s=0.0,
    save_s=0.2,
    profile_s=3.0,
)
SINGLE, TWO = ((0,), (1,)), ((0, 1),)


class Driven:
    """Simulated workers without a controller, that have opened ``pipelines``."""

    def __init__(
        self,
        workers: int = 2,
        *,
        pipelines: dict[str, Pipeline] | None = None,
        costs: WorkerCosts | Callable[[int, str], WorkerCosts] = COSTS,
        message_s: float = 0.0,
    ) -> None:
        self.pipelines = pipelines or {"p": config()}
        by_worker = costs if callable(costs) else lambda *_: costs
        self.cluster = SimulatedCluster(
            workers, costs=by_worker, lengths=lambda *_: (), message_s=message_s, start_s=0.5
        )
        self.everyone = tuple(range(workers))
        self.reports: list[Report] = []
        self.attempts = dict.fromkeys(self.pipelines, 0)
        self._generation = self._lease = 0
        self.connect()
        for name in self.pipelines:
            self.open(name)
        self.until(self.now)

    @property
    def now(self) -> float:
        return self.cluster.clock.now

    def connect(self) -> None:
        self._generation += 1
        store = self.cluster.rendezvous(self._generation)
        self.send(self.everyone, Connect(generation=self._generation, store=store))

    def open(self, name: str) -> None:
        self.attempts[name] += 1
        self.send(self.everyone, OpenPipeline(**self.of(name), config=self.pipelines[name], weights="", optimizer=None,
                                              reference=None, kv_blocks=1))  # fmt: skip

    def of(self, name: str) -> dict[str, Any]:
        return {"pipeline": name, "attempt": self.attempts[name]}

    def send(self, workers: Iterable[int], command: Command) -> None:
        for worker in workers:
            self.cluster.send(worker, [command])

    def generate(self, worker: int, *requests: Request, name: str = "p") -> None:
        self.send([worker], Generate(**self.of(name), step=0, requests=requests))

    def lease(self, workers: Iterable[int], name: str = "p", purpose: str = "switch") -> Lease:
        self._lease += 1
        return Lease(lease_id=self._lease, pipeline=name, workers=tuple(workers), purpose=purpose)

    def switch(
        self, before: Sequence[tuple[int, ...]], groups: tuple[tuple[int, ...], ...], name: str = "p", **options
    ) -> Lease:
        """``before`` are the groups that there are, of all who take part."""
        lease = self.lease(sorted({w for group in (*before, *groups) for w in group}), name)
        command = Switch(**self.of(name), step=0, lease=lease, groups=groups, **options)
        members = {w for group in before for w in group}
        alone = [w for group in groups for w in group if w not in members]
        self.send([*(group[0] for group in before), *alone], command)
        return lease

    def update(self, name: str = "p") -> Lease:
        lease = self.lease(self.everyone, name, "update")
        self.send(self.everyone, Update(**self.of(name), step=0, lease=lease))
        return lease

    def stop(self) -> None:
        """Workers tell the last of what they have done."""
        self.send(self.everyone, Stop())
        self.run()

    def until(self, time: float) -> list[Report]:
        """What is reported up to then."""
        news: list[Report] = []
        while True:
            reports = self.cluster.poll(time - self.now)
            news += reports
            if not reports:
                break
        self.reports += news
        return news

    def run(self, seconds: float = 1000.0) -> list[Report]:
        return self.until(self.now + seconds)

    def ends(self) -> dict[tuple[str, int], float]:
        """When each sample ended."""
        found = [((c.request_id, c.sample), r.ended) for r in self.all(Sampled) for c in r.completions]
        assert len(dict(found)) == len(found), "a sample ended twice"
        return dict(found)

    def all(self, kind: type) -> list:
        return [report for report in self.reports if isinstance(report, kind)]

    def spans(self, worker: int, substage: SubStage, name: str = "p") -> list[Span]:
        found = [event for report in self.all(Happened) for event in report.events]
        return [s for s in found if (s.worker, s.substage, s.pipeline) == (worker, substage, name)]


def config(**rollout: Any) -> Pipeline:
    return Pipeline.model_validate({"model": "m", "task": "t", "rollout": rollout})


def some_requests(*lengths: tuple[int, ...], prompt: int = 10, first: int = 0) -> list[Request]:
    return [
        request(f"r{i}", prompt_of(prompt, seed=i), samples=len(row), forced=row, max_tokens=999)
        for i, row in enumerate(lengths, first)
    ]
