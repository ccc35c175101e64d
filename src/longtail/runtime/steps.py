"""The steps of one pipeline: which rollout and which training are under way, and what may begin next.

A step is rollout -> score -> train -> update: ``runtime/rollout_phase.py`` sees to the first two, which overlap, and
``runtime/train_phase.py`` to the others. Which may begin when is in ``runtime/schedule.py`` (with a ``max_staleness``
rollouts are ahead of trainings, without one they alternate), and whose turn it is in ``runtime/turns.py``.

Invariant: a step's samples are all drawn with one version of the weights, which depends on nothing but the step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from longtail.cluster.messages import Command, Refresh, Sampled
from longtail.core.clock import Clock
from longtail.core.events import Event, Note, StageEntered, StepEnded
from longtail.planner.state import PipelineState
from longtail.runtime.leases import Leases
from longtail.runtime.metrics import StepClock
from longtail.runtime.own_turns import OwnTurns
from longtail.runtime.plan import PipelinePlan, Rewards
from longtail.runtime.rollout_phase import RolloutPhase, StepUnderWay
from longtail.runtime.schedule import Schedule
from longtail.runtime.standing import Standing
from longtail.runtime.train_phase import TrainPhase
from longtail.runtime.turns import Turns


class Steps:
    """For one pipeline over ``workers`` workers; ``step_over()`` is called after each step. The rest is the
    controller's.

    ``attempt`` goes into all commands. Nothing is begun unless :meth:`go_on` is called. Rollouts begin on the workers
    ``begin_on`` (None: on all).
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
        turns: Turns,
        wake: Callable[[], None],
        clock: Clock = time,
        step_over: Callable[[], None],
    ) -> None:
        self._plan, self._workers, self._send, self._emit, self._time = plan, workers, send, emit, clock
        self._step_over = step_over
        self._turns = OwnTurns(turns, plan.name, wake=wake)
        self.training = TrainPhase(plan, workers=workers, send=send, leases=leases, clock=clock)
        self.rollout = RolloutPhase(
            plan,
            workers=workers,
            rewards=rewards,
            send=send,
            emit=emit,
            leases=leases.beside(lambda: self._training_needs_workers),
            wake=wake,
            clock=clock,
        )
        self._standing = Standing(plan, self.rollout.widen, workers=workers)
        self.begin_on: tuple[int, ...] | None = None
        self._under_way: deque[StepUnderWay] = deque()
        """Steps whose rollout has begun, oldest first: the first one is trained next."""
        self._next_clock = StepClock(clock)
        self._last_end = 0.0
        self._begin_at(0, attempt=0)

    def restart(self, first: int, *, attempt: int) -> None:
        """Abandon what is under way; ``first`` steps are done."""
        self.abandon()
        self._begin_at(first, attempt=attempt)

    def _begin_at(self, first: int, *, attempt: int) -> None:
        config = self._plan.config
        self.attempt = attempt
        self.schedule = Schedule(first=first, steps=config.steps, staleness=config.max_staleness)

    def abandon(self) -> None:
        """What is under way will not be finished."""
        for step in self._under_way:
            step.cancel()
        self._under_way.clear()
        self.rollout.abandon()
        self.training.reset()
        self._turns.forget()
        self._next_clock = StepClock(self._time)
        self._last_end = 0.0

    @property
    def under_way(self) -> bool:
        """Whether workers may have work."""
        return bool(self._under_way)

    @property
    def stage(self) -> str:
        """``rollout``, ``train``, ``update``, ``score`` or ``ready`` (to begin a step): the first one that applies."""
        if self.rollout.now is not None and not self.rollout.now.ended:
            return "rollout"
        if self.training.at != "nothing":
            return self._training_stage
        return "score" if self._under_way else "ready"

    @property
    def _stage_of_oldest(self) -> str:
        """The stage of the step that is trained next, which another rollout may be ahead of."""
        ahead = len(self._under_way) > 1
        return ("score" if self.training.at == "nothing" else self._training_stage) if ahead else self.stage

    @property
    def _training_stage(self) -> str:
        return "train" if self.training.at == "passing" else "update"

    def state(self, now: float) -> PipelineState | None:
        """Where the pipeline stands at the time ``now``; None as long as nothing is known of its steps."""
        oldest = self._under_way[0] if self._under_way else None
        start = (oldest.clock if oldest is not None else self._next_clock).start
        elapsed_s = 0.0 if start is None else now - start
        return self._standing.state(
            self._stage_of_oldest,
            self.schedule,
            oldest,
            self.rollout.now,
            elapsed_s=elapsed_s,
            training=self.training,
        )

    def sampled(self, report: Sampled) -> None:
        """Samples have ended."""
        if self.rollout.sampled(report):
            self._enter("score", self._under_way[-1])

    def collect_rewards(self) -> None:
        """Take those that have come back. Raises :class:`RewardError`."""
        for step in self._under_way:
            step.collect_rewards()

    def go_on(self, *, ending: bool) -> None:
        """Begin what may begin now; if it is ``ending``, nothing but what would leave weights between two updates."""
        if self.rollout.at_rest:
            self.rollout.end()
            self.schedule.sampled()
            self._turns.done("rollout")
        for step in self._under_way:
            if step.scored:
                step.clock.enter("queued")
        if self.training.at == "passing":
            self.training.hand_out()
        if not ending:
            if self.schedule.may_settle:
                self._settle_weights()
            if self._turns.grants("rollout"):
                self._begin_rollout()
            if self._may_train:
                self._turns.ask("train")
            if self._turns.grants("train"):
                self._begin_training()
        if self.training.at == "passed" and self.schedule.may_update and not (ending and self.training.iteration == 0):
            if self.training.has_signal:
                self._enter("update", self._under_way[0])
            self.training.update()
        if self.training.at == "over":
            self._finish_step()

    def _settle_weights(self) -> None:
        """The weights for the next rollout are there: it may begin as soon as it is this pipeline's turn."""
        if self.schedule.settle():
            refresh = Refresh(pipeline=self._plan.name, attempt=self.attempt, updates=self.schedule.copied)
            for worker in range(self._workers):
                self._send(worker, refresh)
        self._next_clock = StepClock(self._time)
        self._next_clock.enter("ready")
        self._turns.ask("rollout")

    def _begin_rollout(self) -> None:
        number = self.schedule.begin()
        self._tell(number, "rollout", self._next_clock)
        step = self.rollout.begin(
            number,
            weights=self.schedule.copied,
            clock=self._next_clock,
            attempt=self.attempt,
            on=self.begin_on,
        )
        self._under_way.append(step)

    @property
    def _may_train(self) -> bool:
        waits = self.training.at == "nothing" and bool(self._under_way) and self._under_way[0].scored
        return waits and self.schedule.may_train

    @property
    def _training_needs_workers(self) -> bool:
        """Now, or as soon as this pipeline goes on: the rollout under way must not take them for groups."""
        match self.training.at:
            case "nothing":
                return self._may_train
            case "passed":
                return self.schedule.may_update
        return self.training.at != "over"

    def _begin_training(self) -> None:
        step, name = self._under_way[0], self._plan.name
        unscored = sum(r is None for g in step.batch.groups for r in g.rewards or ())
        if unscored:
            message = f"{name}: {unscored} samples of step {step.step + 1} have no reward: left out."
            self._emit(Note(level="warning", message=message, pipeline=name))
        self._enter("train", step)
        groups = step.batch.train_groups(self._plan.config.algorithm.scale_rewards)
        self.training.begin(step.step, groups, attempt=self.attempt)

    def _finish_step(self) -> None:
        step, now = self._under_way.popleft(), self._time.time()
        metrics = (
            step.batch.metrics() | step.finish() | step.metrics | self.training.metrics() | step.clock.seconds(now)
        )
        # Steps that overlap do not count the same seconds twice.
        took_s = max(now - max(now - metrics["time_s"], self._last_end), 1e-9)
        metrics["tokens_per_s"] = metrics["tokens"] / took_s
        if self.schedule.staleness:
            metrics["staleness"] = float(step.step - step.weights)
        overlaps = self.schedule.staleness > 0 and self._last_end > 0.0
        metrics |= self._standing.finished(
            step, self.schedule, self.training, score_s=metrics["score_s"], took_s=took_s, overlaps=overlaps
        )
        self._emit(StepEnded(pipeline=self._plan.name, step=step.step, metrics=metrics))
        self._last_end = now
        self.training.reset()
        self.schedule.updated()
        self._turns.done("train", step_over=True)
        self._step_over()

    def _enter(self, stage: str, step: StepUnderWay) -> None:
        self._tell(step.step, stage, step.clock)

    def _tell(self, step: int, stage: str, clock: StepClock) -> None:
        clock.enter(stage)
        self._emit(StageEntered(pipeline=self._plan.name, step=step, stage=stage))
