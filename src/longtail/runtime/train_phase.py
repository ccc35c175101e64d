"""The training of one step: its micro-batches, handed out to workers as they get free, and the update by all of them.

Which worker computes what, and when, changes no bit of the gradient (``rl/trainer.py``), so every worker takes as many
micro-batches as it has time for beside whatever else it does. Workers that sample in tensor-parallel groups have none:
they get micro-batches when they are on their own again.

Invariants: in each pass over a step every micro-batch is handed out once and counted once; the update is asked for when
all are, and every worker takes part in it, also one that has computed none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from longtail.cluster.messages import Command, Hurry, TrainBatches, Trained, Update, Updated
from longtail.core.clock import Clock
from longtail.core.errors import TrainingError
from longtail.core.types import Lease, StepTotals, TrainGroup
from longtail.rl.packing import MicroBatch, plan_micro_batches, with_signal
from longtail.rl.trainer import MicroStats, UpdateStats
from longtail.runtime.leases import Leases
from longtail.runtime.metrics import learning_metrics
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.step import totals

AHEAD = 2
"""Micro-batches that a worker has at a time, so that it need not wait for the next one, as long as there are many."""
MANY, MANY_SHARED = 1, 3
"""Micro-batches that are left, for each worker, that are many: for one with nothing else to do, and for others."""


class Deal:
    """One pass over ``batches``, costliest first, by ``workers`` workers. ``stats`` are those reported, by number.

    A worker has the next one in advance (:data:`AHEAD`) as long as many are left (:data:`MANY`). Towards the end it has
    one at a time, so that nobody sits on what another could do: one with other work may take long for it. The only
    worker there is gets all at once.
    """

    def __init__(self, batches: Sequence[MicroBatch], workers: int) -> None:
        self._batches = batches
        self._next = 0
        self._held: list[set[int]] = [set() for _ in range(workers)]
        self._ahead = AHEAD if workers > 1 else len(batches)
        self._many = [MANY_SHARED] * workers
        self._hurried: set[int] = set()
        self.stats: dict[int, MicroStats] = {}

    def hand_out(self, away: Collection[int] = ()) -> dict[int, list[int]]:
        """The numbers that workers get now; those that are ``away`` from training get none."""
        given: dict[int, list[int]] = {}
        here = [worker for worker in range(len(self._held)) if worker not in away]
        for _ in range(self._ahead):
            for worker in here:
                left = self.left
                room = self._ahead if len(self._held) == 1 or left >= self._many[worker] * len(here) else 1
                if left and len(self._held[worker]) < room:
                    given.setdefault(worker, []).append(self._next)
                    self._held[worker].add(self._next)
                    self._next += 1
        return given

    @property
    def left(self) -> int:
        """Micro-batches that nobody has yet."""
        return len(self._batches) - self._next

    def hurry(self, away: Collection[int] = ()) -> list[int]:
        """The workers that are waited for from now on: one has nothing left, and there is nothing to hand out. But not
        where each had just one: that is no tail."""
        if self.left or len(self._batches) <= len(self._held):
            return []
        here = [worker for worker in range(len(self._held)) if worker not in away]
        if all(self._held[worker] for worker in here):
            return []
        late = [worker for worker in here if self._held[worker] and worker not in self._hurried]
        self._hurried.update(late)
        return late

    def done(self, worker: int, number: int, stats: MicroStats, *, shared: bool = True) -> None:
        """``worker`` has computed ``number``; ``shared``: it had other work, too. Raises ``RuntimeError`` if it does
        not have that one."""
        if number not in self._held[worker]:
            raise RuntimeError(f"worker {worker} reports micro-batch {number}, which it was not given or has reported")
        self._held[worker].remove(number)
        self._many[worker] = MANY_SHARED if shared else MANY
        self.stats[number] = stats

    @property
    def over(self) -> bool:
        return len(self.stats) == len(self._batches)

    @property
    def tokens_left(self) -> int:
        return sum(batch.tokens for number, batch in enumerate(self._batches) if number not in self.stats)


class TrainPhase:
    """For one pipeline over ``workers`` workers; ``send`` and ``leases`` are the controller's.

    ``at``: ``nothing``; ``passing`` over the micro-batches; ``passed``, it waits for :meth:`update`; ``updating``, also
    while the lease for it is awaited; ``over``.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        *,
        workers: int,
        send: Callable[[int, Command], None],
        leases: Leases,
        clock: Clock = time,
    ) -> None:
        self._plan, self._workers, self._send, self._leases, self._time = plan, workers, send, leases, clock
        self.reset()

    def reset(self) -> None:
        """Nothing is trained, or what is will not be finished."""
        self.at: Literal["nothing", "passing", "passed", "updating", "over"] = "nothing"
        self.has_signal = False
        """Whether there is a gradient; without one not even the optimizer's momentum may move the weights."""
        self.tokens = 0
        """Computed in all passes."""
        self.update_s = 0.0
        """Seconds of updates from lease to end."""
        self.iteration = 0
        """Updates of this step that are done."""
        self._batches: list[MicroBatch] = []
        self._deal = Deal([], self._workers)
        self._update_stats: UpdateStats | None = None
        self._waiting_for: set[int] = set()
        self._granted: float | None = None
        """Since when the workers have the update that is under way."""

    @property
    def between_updates(self) -> bool:
        """Whether the weights are not those of a whole step, or will soon not be. An update that still waits for its
        lease can be dropped."""
        return self._granted is not None or self.iteration > 0

    @property
    def tokens_left(self) -> int:
        """Tokens of this pass that are not computed yet, and of those to come."""
        passes = self._plan.config.algorithm.iterations if self.has_signal else 1
        whole = sum(batch.tokens for batch in self._batches)
        return self._deal.tokens_left + whole * max(0, passes - 1 - self.iteration)

    def begin(self, step: int, groups: Sequence[TrainGroup], *, attempt: int) -> None:
        """Train on ``groups``; of none there is nothing to compute."""
        self.reset()
        config = self._plan.config
        self._step, self._attempt = step, attempt
        self._totals: StepTotals = totals(groups, config.rollout.max_tokens)
        self.has_signal = bool(groups)
        if config.algorithm.beta == 0:
            # Groups whose advantages are all 0 have no gradient; one is kept so that log-probs are still compared.
            signal = with_signal(groups)
            self.has_signal, groups = bool(signal), signal or groups[:1]
        self._batches = plan_micro_batches(groups, workers=self._workers, micro_tokens=config.train.micro_tokens)
        self._pass()

    def _pass(self) -> None:
        self.at = "passing"
        self._deal = Deal(self._batches, self._workers)
        self.tokens += self._deal.tokens_left
        self.hand_out()
        self._look()

    def hand_out(self) -> None:
        """Give the workers that are on their own what they have room for."""
        handed_out = self._deal.hand_out(self._leases.grouped)
        for worker, numbers in handed_out.items():
            command = TrainBatches(
                pipeline=self._plan.name,
                attempt=self._attempt,
                step=self._step,
                batches=tuple((number, self._batches[number]) for number in numbers),
                totals=self._totals,
                more=self._deal.left > 0,
            )
            self._send(worker, command)
        for worker in self._deal.hurry(self._leases.grouped):
            self._send(worker, Hurry(pipeline=self._plan.name, attempt=self._attempt, step=self._step))

    def _look(self) -> None:
        if self._deal.over:
            self.at = "passed"

    def trained(self, report: Trained) -> None:
        """A micro-batch is done. Raises :class:`TrainingError` if its loss is not finite."""
        if not math.isfinite(report.stats.loss):
            raise TrainingError(
                f"the loss of step {report.step + 1} is {report.stats.loss}, so nothing more can be learnt;"
                " lower train.lr or look for broken rewards"
            )
        self._deal.done(report.worker, report.number, report.stats, shared=report.shared)
        self.hand_out()
        self._look()

    def update(self) -> None:
        """All is computed, and the weights may change: ask for the workers."""
        assert self.at == "passed"
        if not self.has_signal:
            self.at = "over"
            return
        self.at = "updating"
        self._waiting_for = set(range(self._workers))
        self._leases.ask(tuple(range(self._workers)), "update")

    def granted(self, lease: Lease) -> None:
        """The lease is here: all workers reduce and step."""
        self._granted = self._time.monotonic()
        command = Update(pipeline=self._plan.name, attempt=self._attempt, step=self._step, lease=lease)
        for worker in range(self._workers):
            self._send(worker, command)

    def updated(self, report: Updated) -> None:
        """A worker has its part of the update; with the last one the next pass begins, or the training is over."""
        self._update_stats = report.stats
        self._waiting_for.discard(report.worker)
        if self._waiting_for:
            return
        assert self._granted is not None
        self.update_s += self._time.monotonic() - self._granted
        self._granted = None
        self.iteration += 1
        if self.iteration < self._plan.config.algorithm.iterations:
            self._pass()
        else:
            self.at = "over"

    def metrics(self) -> dict[str, float]:
        """What was learned, in the last pass."""
        return learning_metrics(self._deal.stats, self._update_stats)
