"""A ``StepWiden`` without a controller: the test says when leases are granted and what workers report."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from longtail.cluster.messages import Alive, Switch, Switched
from longtail.core.config import Pipeline
from longtail.planner.order import Work
from longtail.rl.tasks import Example
from longtail.runtime.leases import LeaseBook, Leases
from longtail.runtime.live import KnownLengths
from longtail.runtime.step import StepBatch
from longtail.runtime.widen import StepWiden
from planner.rollouts import table

FASTER = table({1: (0.02, 0.001, 0.0), 2: (0.011, 0.0006, 0.0), 4: (0.006, 0.0004, 0.0)}, kv_heads=4)
"""Steps of wide groups are shorter, but narrow groups get more done together."""


@dataclass
class Bench:
    """A StepWiden between a lease book and workers that do as they are told, when the test says so."""

    workers: int = 2
    tp: int | str = "auto"
    costs: object = FASTER
    contended: bool = False
    lengths: tuple[int, ...] = (5, 6, 90, 8)
    company: bool = False
    max_merges: int = 2
    may_widen: bool = True
    order: str = "ranked"
    sent: list[tuple[int, Switch]] = field(default_factory=list)
    events: list = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.book = LeaseBook()
        rollout = {"tp": self.tp, "order": self.order, "prompts": len(self.lengths) // 2, "max_tokens": 100}
        config = Pipeline.model_validate(
            {"model": "tiny", "task": "collatz", "algorithm": {"group_size": 2}, "rollout": rollout}
        )
        self.plan = SimpleNamespace(
            name="a",
            config=config,
            kv_heads=4,
            kv_tokens=None,
            ranker=None,
            tables=SimpleNamespace(find=lambda: self.costs),
            company=self.company,
            max_merges=self.max_merges,
            may_widen=self.may_widen,
        )
        self.widen = StepWiden(
            self.plan,
            workers=self.workers,
            send=lambda worker, command: self.sent.append((worker, command)),
            emit=self.events.append,
            leases=Leases(self.book, "a", contended=lambda: self.contended),
            clock=SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now),
        )
        prompts = [np.arange(4)] * (len(self.lengths) // 2)
        self.batch = StepBatch.of(0, [Example("p", {}) for _ in prompts], prompts, 2)
        self.requests = self.batch.requests(config, SimpleNamespace(max_tokens=100), self.workers)

    def begin(self, on: tuple[int, ...] | None = None) -> bool:
        samples = np.array([r.samples for r in self.requests])
        work = Work.known(samples, np.full(len(samples), 4), np.array(self.lengths))
        return self.widen.begin(self.batch, self.requests, work, KnownLengths(np.array(self.lengths)), on=on)

    def grant(self) -> bool:
        (lease,) = self.book.grant()
        return self.widen.granted(lease, attempt=1)

    def hear(self, generated: dict[int, list[list[int]]], *, dispatched: bool = True) -> None:
        """What each leader reports: of each of its requests the tokens of each sample."""
        requests = iter(self.requests)
        for worker, counts in generated.items():
            self.hear_from(worker, {next(requests).request_id: count for count in counts}, dispatched=dispatched)

    def hear_from(self, worker: int, generated: dict[str, list[int]], *, dispatched: bool = True) -> None:
        report = Alive(
            worker=worker, pipeline="a", attempt=1, step=0,
            request_ids=tuple(generated), generated=tuple(np.array(count) for count in generated.values()),
        )  # fmt: skip
        self.widen.alive(report, dispatched=dispatched)

    def end(self, *samples: int) -> None:
        for number in samples:
            self.widen.ended(number // 2, number % 2, tokens=self.lengths[number], cut_off=False)

    def switched(self, refused: str | None = None) -> None:
        """All members of the switch that was sent last report it."""
        _, command = self.sent[-1]
        singles = tuple((w,) for w in command.lease.workers)
        groups = singles if refused else command.groups
        for worker in command.lease.workers:
            report = Switched(
                worker=worker, pipeline="a", attempt=1, step=0, lease_id=command.lease.lease_id, groups=groups,
                duration_s=0.1 * (worker + 1), sequences=2, moved_bytes=10, recomputed_tokens=3, refused=refused,
            )  # fmt: skip
            if all(len(group) == 1 for group in groups):  # as the controller does, which hears of it first
                self.book.member_done("a", worker, command.lease.lease_id)
            self.widen.switched(report)

    def of_kind(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]
