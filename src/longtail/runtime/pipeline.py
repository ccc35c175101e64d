"""One pipeline as the controller sees it: a state machine that turns reports into commands.

Here is its life: open, fall back, save, end. Its steps are in ``runtime/steps.py``. Nothing blocks: rewards come back
through futures, everything else through worker reports.

Invariants: reports of an earlier attempt are ignored. A pipeline ends exactly once, as finished, failed or interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from longtail.cluster.messages import (
    Alive,
    ClosePipeline,
    Command,
    DropWork,
    Opened,
    OpenPipeline,
    PipelineFailed,
    PipelineReport,
    Profile,
    Profiled,
    Sampled,
    Save,
    Saved,
    SaveFailed,
    Switched,
    Trained,
    Updated,
)
from longtail.core.clock import Clock
from longtail.core.errors import CheckpointError, RewardError
from longtail.core.events import (
    CheckpointSaved,
    Event,
    Note,
    PipelineEnded,
    PipelineStarted,
    Rollback,
    Span,
    StageEntered,
)
from longtail.core.types import Lease
from longtail.planner.state import PipelineState, Relocation
from longtail.runtime.leases import Leases
from longtail.runtime.plan import PipelinePlan, Rewards
from longtail.runtime.saver import Saver
from longtail.runtime.steps import Steps
from longtail.runtime.turns import Turns

OVER = ("finished", "failed", "interrupted")


class PipelineDriver:
    """Drives one pipeline over ``workers`` workers.

    ``send(worker, command)``, ``emit(event)``, ``leases``, ``turns`` and ``wake()`` are the controller's.
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
        turns: Turns | None = None,
        clock: Clock = time,
    ) -> None:
        self.plan, self.workers = plan, workers
        self.attempt = self._opened_as = 0
        self.error: str | None = None
        self.saver = Saver(plan.folder, workers=workers, keep=plan.config.checkpoint.keep, clock=clock)
        self._send, self._emit, self._leases = send, emit, leases
        self._steps = Steps(
            plan,
            workers=workers,
            rewards=rewards,
            send=send,
            emit=emit,
            leases=leases,
            turns=turns or Turns(),
            wake=wake,
            clock=clock,
            step_over=self._step_over,
        )
        self.order, self.widen = self._steps.rollout.order, self._steps.rollout.widen
        self._learnt: dict[str, Any] = {}
        self._waiting_for: set[int] = set()
        self._life = "new"
        """``new``, ``load``, ``profile``, ``steps``, ``checkpoint`` (the last one), or one of :data:`OVER`."""
        self._ending: str | None = None

    # -- life -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def over(self) -> bool:
        return self._life in OVER

    @property
    def step(self) -> int:
        """Steps done."""
        return self._steps.schedule.trained

    @property
    def stage(self) -> str:
        """``new``, ``load``, ``profile``, a stage of its steps (:attr:`Steps.stage`), ``checkpoint``, ``finished``,
        ``failed`` or ``interrupted``."""
        return self._steps.stage if self._life == "steps" else self._life

    def open(self, *, reason: str | None = None) -> None:
        """Load the newest complete checkpoint, or the initial model, on all workers.

        ``reason`` says why a running pipeline falls back.
        """
        found = self.saver.find()
        for skipped in found.skipped:
            self._note("warning", f"{self.name}: a damaged checkpoint is skipped: {skipped}.")
        if found.skipped and not found.path:
            self.fail(f"{self.name}: no checkpoint in {self.plan.folder} is complete; remove them or use --fresh.")
            return
        self.attempt += 1
        self._opened_as = self.attempt
        self._waiting_for.clear()
        self._steps.restart(found.step, attempt=self.attempt)
        self.order.load_state_dict(found.state.get("order"))
        self.widen.load_state_dict(found.state.get("widen"))
        if self._ending == "finished":  # the last checkpoint was not to be; its steps are made again
            self._ending = None
        if found.path or reason:
            self._emit(Rollback(pipeline=self.name, step=self.step, reason=reason or "resumed from checkpoint"))
        config = self.plan.config
        if self.step >= config.steps:
            self._announce(parameters=0)
            self._end("finished")
            return
        self._live("load")
        self._waiting_for = set(range(self.workers))
        command = OpenPipeline(
            pipeline=self.name,
            attempt=self.attempt,
            config=config,
            weights=str(found.path or self.plan.model_folder),
            optimizer=str(found.path) if found.path else None,
            reference=str(self.plan.model_folder) if config.algorithm.beta > 0 else None,
            kv_blocks=self.plan.kv_blocks,
        )
        self._send_all(lambda _: command)

    def interrupt(self) -> None:
        """Stop after the weights are safe: finish an update that has begun, drop everything else, save, end."""
        if self.over or self._ending:
            return
        self._ending = "interrupted"
        if self._may_settle:
            self._settle()

    def fail(self, error: str, *, alone: bool = True) -> None:
        """End the pipeline with an error; its last checkpoint stays. ``alone``: other pipelines are not concerned."""
        if self.over:
            return
        where = f"checkpoint {self.saver.last_path.name}" if self.saver.last_path else "its start (no checkpoint yet)"
        stop = "" if error.endswith(".") else "."
        others = "; other pipelines go on" if alone else ""
        self.error = f"{error}{stop} The pipeline is stopped at {where}{others}."
        self._end("failed")

    def _end(self, reason: str) -> None:
        self._life = reason
        self._abandon_work()
        self._send_all(lambda _: ClosePipeline(pipeline=self.name, attempt=self.attempt))
        self._emit(PipelineEnded(pipeline=self.name, step=self.step, reason=reason, error=self.error))

    def _abandon_work(self) -> None:
        self._waiting_for.clear()
        self._steps.abandon()

    # -- reports ----------------------------------------------------------------------------------------------

    def handle(self, report: PipelineReport) -> None:
        """Take one worker report; reports of earlier attempts are dropped.

        Dropping work begins a new attempt too, but a pipeline that failed before that is still broken.
        """
        failed = isinstance(report, PipelineFailed) and report.attempt >= self._opened_as
        if self.over or (report.attempt != self.attempt and not failed):
            return
        match report:
            case Opened():
                self._arrived(report.worker, lambda: self._opened(report.parameters))
            case Profiled():
                self.widen.profiled(report)
                self._arrived(report.worker, self._begin_steps)
            case Alive():
                self._steps.rollout.alive(report)
            case Switched():
                self._steps.rollout.switched(report)
            case Sampled():
                self._steps.sampled(report)
            case Trained():
                self._steps.training.trained(report)
            case Updated():
                self._steps.training.updated(report)
            case Saved():
                self._saved(report)
            case SaveFailed():
                if self.saver.step_in_progress == report.step:
                    self._could_not_save(report.error)
            case PipelineFailed():
                if report.traceback:
                    self._note("error", f"{self.name}: worker {report.worker}:\n{report.traceback}")
                self.fail(f"{self.name}: {report.error}")
        self._go_on()

    def _arrived(self, worker: int, then: Callable[[], None]) -> None:
        """Count one worker's answer; go on when all have answered."""
        self._waiting_for.discard(worker)
        if not self._waiting_for:
            then()

    def _opened(self, parameters: int) -> None:
        self._announce(parameters)
        if self._ending:
            self._end(self._ending)
        elif self.widen.wants_profile:
            self._live("profile")
            self._waiting_for = set(range(self.workers))
            self._leases.ask(tuple(range(self.workers)), "profile")
        else:
            self._begin_steps()

    def granted(self, lease: Lease) -> None:
        """A lease is here that was asked for: all its workers reduce and step, measure, or change their layout."""
        match lease.purpose:
            case "update":
                self._steps.training.granted(lease)
            case "profile" if not self.widen.wants_profile:
                self._leases.release(lease)
                self._waiting_for.clear()
                self._begin_steps()
                self._go_on()
            case "profile":
                profile = Profile(
                    pipeline=self.name, attempt=self.attempt, lease=lease, degrees=self.widen.degrees, fine=False
                )
                self._send_all(lambda _: profile)
            case "switch":
                self._steps.rollout.granted(lease)

    def collect_rewards(self) -> None:
        """Take the rewards that have come back, and begin what may begin now."""
        try:
            self._steps.collect_rewards()
        except RewardError as error:
            self.fail(str(error))
        self._go_on()

    def observe(self, span: Span) -> None:
        """A span of this pipeline's work: what it took."""
        self.order.observe(span)

    # -- what the conductor asks and says ---------------------------------------------------------------------

    @property
    def begin_on(self) -> tuple[int, ...] | None:
        """The workers on which the next rollout begins; None: all."""
        return self._steps.begin_on

    @begin_on.setter
    def begin_on(self, workers: tuple[int, ...] | None) -> None:
        self._steps.begin_on = workers

    def state(self, now: float) -> PipelineState | None:
        """Where it stands at the time ``now``; None while it is away, or as long as nothing is known of its steps."""
        return self._steps.state(now) if self._life == "steps" else None

    def relocate(self, relocation: Relocation) -> None:
        """Move the samples of the rollout under way, if that can be."""
        if self._steps.rollout.now is not None:
            self.widen.relocate(relocation)

    # -- steps ------------------------------------------------------------------------------------------------

    def _begin_steps(self) -> None:
        self._life = "steps"

    def _go_on(self) -> None:
        """Begin what may begin now."""
        if self._life == "steps":
            self._steps.go_on(ending=self._ending is not None)

    def _step_over(self) -> None:
        """The weights are those of one more step."""
        config = self.plan.config
        if self.step >= config.steps:
            self._ending = "finished"
        if self._ending:
            self._settle()
            return
        if self.step % config.checkpoint.every == 0 and not self.saver.busy:
            self._begin_save()
        self._go_on()

    # -- checkpoints ------------------------------------------------------------------------------------------

    @property
    def _may_settle(self) -> bool:
        """Whether the weights are those of a whole step: not inside an update, nor between two of one step."""
        return not self._steps.training.between_updates

    def _settle(self) -> None:
        """On the way out: forget unfinished work, save what is not saved, then end."""
        assert self._ending is not None
        if self.saver.busy:
            return  # comes back here when that checkpoint is published
        dropped = self._steps.under_way or self._life == "profile"
        self._abandon_work()
        if dropped:
            self.attempt += 1
            self._send_all(lambda _: DropWork(pipeline=self.name, attempt=self.attempt))
        if self._life in ("new", "load", "profile") or self.saver.last_step == self.step:
            self._end(self._ending)
        else:
            self._begin_save()

    def _begin_save(self) -> None:
        try:
            folder = self.saver.begin(self.step)
        except CheckpointError as error:
            self._could_not_save(str(error))
            return
        if self._ending:
            self._live("checkpoint")
        # Now: other steps may be over when the checkpoint is published.
        self._learnt = {"order": self.order.state_dict(), "widen": self.widen.state_dict()}
        command = Save(
            pipeline=self.name,
            attempt=self.attempt,
            step=self.step,
            folder=str(folder),
            source=str(self.plan.model_folder),
        )
        self._send_all(lambda _: command)

    def _saved(self, report: Saved) -> None:
        try:
            published = self.saver.part_written(report, self._state)
        except CheckpointError as error:
            self._could_not_save(str(error))
            return
        if published is None:
            return
        self._emit(
            CheckpointSaved(
                pipeline=self.name,
                step=published.step,
                path=str(published.path),
                bytes=published.bytes,
                duration_s=published.duration_s,
            )
        )
        if self._ending and self._may_settle:
            self._settle()

    def _state(self, step: int) -> dict[str, Any]:
        config = self.plan.config
        return {
            "step": step,
            "seed": config.seed,
            "next_prompt": step * config.rollout.prompts,
            "workers": self.workers,
            "config": config.model_dump(mode="json"),
            **self._learnt,
        }

    def _could_not_save(self, error: str) -> None:
        self.saver.give_up()
        if self._ending:
            self.fail(f"{self.name}: the checkpoint of step {self.step} could not be written: {error}")
        else:
            self._note("error", f"{self.name}: no checkpoint at step {self.step}: {error}. Training goes on.")

    # -- small things -----------------------------------------------------------------------------------------

    def _live(self, stage: str) -> None:
        self._life = stage
        self._emit(StageEntered(pipeline=self.name, step=self.step, stage=stage))

    def _announce(self, parameters: int) -> None:
        config = self.plan.config
        self._emit(
            PipelineStarted(
                pipeline=self.name,
                step=self.step,
                steps=config.steps,
                model=config.model,
                task=config.task,
                parameters=parameters,
            )
        )

    def _send_all(self, command: Callable[[int], Command]) -> None:
        for worker in range(self.workers):
            self._send(worker, command(worker))

    def _note(self, level: str, message: str) -> None:
        self._emit(Note(level=level, message=message, pipeline=self.name))
