"""The rollout of one step: its requests go out, its samples come back, and each group that is complete is scored.

Where requests go is seen to by ``runtime/order.py``, on which workers and in which layout by ``runtime/widen.py``.
Scoring overlaps the rollout, and whatever comes after it: a :class:`StepUnderWay` collects its rewards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from longtail.cluster.messages import Alive, Command, Generate, Sampled, Switched
from longtail.core.clock import Clock
from longtail.core.events import Event, SequenceEnded
from longtail.core.types import FinishReason, Lease, Request
from longtail.planner.state import StepShape
from longtail.runtime.leases import Leases
from longtail.runtime.metrics import StepClock
from longtail.runtime.order import StepOrder
from longtail.runtime.plan import PipelinePlan, Rewards
from longtail.runtime.shape import expected_shape, sampled_shape
from longtail.runtime.step import Group, StepBatch, StepSource
from longtail.runtime.widen import StepWiden


@dataclass
class StepUnderWay:
    """A step from the start of its rollout to its update.

    ``weights``: after how many steps the weights are with which it is sampled. ``shape``: what is expected of it, and
    what it was once its rollout is over; None if nothing is known. ``finish`` is what ``StepOrder`` wants to do at its
    end, ``metrics`` are those of the rollout.
    """

    batch: StepBatch
    requests: list[Request]
    weights: int
    clock: StepClock
    shape: StepShape | None
    rewards: dict[Future, Group] = field(default_factory=dict)
    """Those that are awaited."""
    ended: bool = False
    """Whether all samples have ended."""
    sampled: bool = False
    """Whether the workers are also back on their own: the rollout is over."""
    finish: Callable[[], dict[str, float]] = dict
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def scored(self) -> bool:
        """Whether it can be trained."""
        return self.sampled and self.batch.scored

    def collect_rewards(self) -> None:
        """Take those that have come back. Raises :class:`RewardError`."""
        for future in [f for f in self.rewards if f.done()]:
            group = self.rewards.pop(future)
            group.rewards = future.result()

    def cancel(self) -> None:
        for future in self.rewards:
            future.cancel()
        self.rewards.clear()


class RolloutPhase:
    """For one pipeline over ``workers`` workers; the rest is the controller's.

    Invariant: at most one rollout is under way, from :meth:`begin` until :meth:`end` or :meth:`abandon`.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        workers: int,
        rewards: Rewards,
        send: Callable[[int, Command], None],
        emit: Callable[[Event], None],
        leases: Leases,
        wake: Callable[[], None],
        clock: Clock = time,
    ) -> None:
        self._plan, self._workers, self._rewards, self._send, self._emit = plan, workers, rewards, send, emit
        self._wake, self._time = wake, clock
        self._source = StepSource(plan)
        self.order = StepOrder(plan, workers=workers, emit=emit)
        self.widen = StepWiden(plan, workers=workers, send=send, emit=emit, leases=leases, clock=clock)
        self.now: StepUnderWay | None = None
        """The step that is sampled."""
        self._attempt = 0

    def begin(
        self, step: int, *, weights: int, clock: StepClock, attempt: int, on: tuple[int, ...] | None
    ) -> StepUnderWay:
        """Sample ``step``, at first on the workers ``on`` (None: on all). Raises ``DataError`` for a prompt that cannot
        be made."""
        batch = self._source.batch(step)
        requests = batch.requests(self._plan.config, self._source.params, self._workers)
        work = self.order.begin(batch, requests, now=self._time.time())
        shape = None if work is None else expected_shape(work, self._plan.config)
        self.now, self._attempt = StepUnderWay(batch, requests, weights, clock, shape), attempt
        if self.widen.begin(batch, requests, work, self.order.live(batch), on=on):
            self._dispatch()
        if self.order.ranks and step + 1 < self._plan.config.steps:
            self.order.look_ahead(self._source.upcoming(step + 1))
        return self.now

    def granted(self, lease: Lease) -> None:
        """A lease is here that was asked for, to change the layout."""
        if self.widen.granted(lease, attempt=self._attempt):
            self._dispatch()

    def _dispatch(self) -> None:
        """The step's layout is there: hand out its first requests."""
        assert self.now is not None
        for worker, first in self.order.dispatch(self.now.batch, self.widen.layout, self.widen.group_costs()):
            self._generate(worker, first)

    def _generate(self, worker: int, requests: list[Request]) -> None:
        if requests:
            assert self.now is not None
            command = Generate(
                pipeline=self._plan.name, attempt=self._attempt, step=self.now.step, requests=tuple(requests)
            )
            self._send(worker, command)

    def alive(self, report: Alive) -> None:
        """How far samples are."""
        if self.now is not None and report.step == self.now.step:
            self.widen.alive(report, dispatched=self.order.all_dispatched)

    def switched(self, report: Switched) -> None:
        """A worker is in its new group, or not."""
        self.widen.switched(report)

    def sampled(self, report: Sampled) -> bool:
        """Samples have ended. Returns whether these were the last of the step."""
        now = self.now
        assert now is not None
        for completion, started in zip(report.completions, report.started, strict=True):
            j, sample = now.batch.end(completion)
            group = now.batch.groups[j]
            cut_off = completion.finish == FinishReason.LENGTH
            self.widen.ended(j, sample, tokens=len(completion.tokens), cut_off=cut_off)
            self._emit(
                SequenceEnded(
                    pipeline=self._plan.name,
                    step=now.step,
                    prompt=j,
                    sample=sample,
                    worker=report.worker,
                    prompt_tokens=len(group.prompt),
                    tokens=len(completion.tokens),
                    finish=completion.finish.value,
                    preemptions=completion.preemptions,
                    start=started,
                    end=report.ended,
                )
            )
            sampled_by = self.widen.layout.group_of(report.worker)
            self._generate(report.worker, self.order.ended(report.worker, group=sampled_by, now=self._time.time()))
            if group.ended:
                self._score(now, group)
        if now.batch.ended:
            now.ended = True
            self.widen.rollout_over()
        return now.ended

    def _score(self, step: StepUnderWay, group: Group) -> None:
        count = len(group.completions)
        future = self._rewards.submit(
            self._plan.name,
            step=step.step + 1,
            prompts=[group.example.prompt] * count,
            completions=group.texts,
            columns={name: [value] * count for name, value in group.example.columns.items()},
        )
        step.rewards[future] = group
        future.add_done_callback(lambda _: self._wake())

    @property
    def at_rest(self) -> bool:
        """Whether the rollout under way has ended, and every worker is on its own again."""
        return self.now is not None and self.now.ended and self.widen.at_rest

    def end(self) -> None:
        """It has come to rest: the next one may begin."""
        step, self.now = self.now, None
        assert step is not None
        step.finish = self.order.rollout_over(step.batch)
        step.metrics = self.widen.finish()
        step.shape = sampled_shape(step.batch, step.requests, self._plan.config)
        step.sampled = True

    def abandon(self) -> None:
        """What is under way will not be finished."""
        self.now = None
        self.order.abandon()
        self.widen.abandon()
