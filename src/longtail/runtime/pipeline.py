"""One pipeline as the controller sees it: a state machine that turns reports into commands.

A step is rollout -> score -> train -> update; scoring overlaps the rollout, group by group. In which layout the rollout
is sampled is seen to by ``runtime/widen.py``. Nothing here blocks: rewards come back through futures, everything else
through worker reports.

Invariants: a step's samples are all drawn with the weights of that step (the update is the only thing that
changes weights, and it is sent only after every sample of the step has ended). Reports of an earlier attempt are
ignored. A pipeline ends exactly once, as finished, failed or interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from longtail.cluster.messages import (
    Alive,
    ClosePipeline,
    Command,
    DropWork,
    Generate,
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
    TrainBatches,
    Trained,
    Update,
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
    SequenceEnded,
    Span,
    StageEntered,
    StepEnded,
)
from longtail.core.types import FinishReason, Lease, Request
from longtail.rl.packing import plan_micro_batches, with_signal
from longtail.rl.trainer import MicroStats, UpdateStats
from longtail.runtime.leases import Leases
from longtail.runtime.metrics import StepClock, learning_metrics
from longtail.runtime.order import StepOrder
from longtail.runtime.plan import PipelinePlan, Rewards
from longtail.runtime.saver import Saver
from longtail.runtime.step import Group, StepBatch, StepSource, totals
from longtail.runtime.widen import StepWiden


class PipelineDriver:
    """Drives one pipeline over ``workers`` workers.

    ``send(worker, command)``, ``emit(event)``, ``leases`` and ``wake()`` are the controller's.
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
        self.plan, self.workers = plan, workers
        self.stage = "new"
        self.step = 0
        self.attempt = self._opened_as = 0
        self.error: str | None = None
        self.saver = Saver(plan.folder, workers=workers, keep=plan.config.checkpoint.keep, clock=clock)
        self._rewards, self._send, self._emit, self._leases, self._wake = rewards, send, emit, leases, wake
        self._source = StepSource(plan)
        self.order = StepOrder(plan, workers=workers, emit=emit)
        self.widen = StepWiden(plan, workers=workers, send=send, emit=emit, leases=leases, clock=clock)
        self._learnt: dict[str, Any] = {}
        self._batch: StepBatch | None = None
        self._futures: dict[Future, Group] = {}
        self._waiting_for: set[int] = set()
        self._train_stats: dict[int, MicroStats] = {}
        self._update_stats = UpdateStats(grad_norm=0.0, lr=0.0)
        self._has_signal = True
        self._iteration = 0
        self._time, self._clock = clock, StepClock(clock)
        self._ending: str | None = None

    # -- life -------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def over(self) -> bool:
        return self.stage in ("finished", "failed", "interrupted")

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
        self._abandon_work()
        self.step = found.step
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
        self._enter("load")
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
        if self._may_settle():
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
        self.stage = reason
        self._abandon_work()
        self._send_all(lambda _: ClosePipeline(pipeline=self.name, attempt=self.attempt))
        self._emit(PipelineEnded(pipeline=self.name, step=self.step, reason=reason, error=self.error))

    def _abandon_work(self) -> None:
        for future in self._futures:
            future.cancel()
        self._futures.clear()
        self._waiting_for.clear()
        self.order.abandon()
        self.widen.abandon()
        self._batch = None
        self._iteration = 0

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
                self._arrived(report.worker, self._begin_step)
            case Alive():
                if self.stage == "rollout" and report.step == self.step:
                    self.widen.alive(report, dispatched=self.order.all_dispatched)
            case Switched():
                self.widen.switched(report)
            case Sampled():
                self._sampled(report)
            case Trained():
                self._train_stats[report.worker] = report.stats
                self._arrived(report.worker, self._trained)
            case Updated():
                self._update_stats = report.stats
                self._arrived(report.worker, self._updated)
            case Saved():
                self._saved(report)
            case SaveFailed():
                if self.saver.step_in_progress == report.step:
                    self._could_not_save(report.error)
            case PipelineFailed():
                if report.traceback:
                    self._note("error", f"{self.name}: worker {report.worker}:\n{report.traceback}")
                self.fail(f"{self.name}: {report.error}")

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
            self._enter("profile")
            self._waiting_for = set(range(self.workers))
            self._leases.ask(tuple(range(self.workers)), "profile")
        else:
            self._begin_step()

    def observe(self, span: Span) -> None:
        """A span of this pipeline's work: what it took."""
        self.order.observe(span)
        self.widen.observe(span)

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

    # -- rollout and score ------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._clock.restart()
        self._train_stats = {}
        self._enter("rollout")
        self._batch = self._source.batch(self.step)
        requests = self._batch.requests(self.plan.config, self._source.params, self.workers)
        work = self.order.begin(self._batch, requests, now=self._time.time())
        if self.widen.begin(self._batch, requests, work, self.order.live(self._batch)):
            self._dispatch()
        if self.order.ranks and self.step + 1 < self.plan.config.steps:
            self.order.look_ahead(self._source.upcoming(self.step + 1))

    def _dispatch(self) -> None:
        """The step's layout is there: hand out its first requests."""
        assert self._batch is not None
        for worker, first in self.order.dispatch(self._batch, self.widen.layout, self.widen.group_costs()):
            self._generate(worker, first)

    def _generate(self, worker: int, requests: list[Request]) -> None:
        if requests:
            command = Generate(pipeline=self.name, attempt=self.attempt, step=self.step, requests=tuple(requests))
            self._send(worker, command)

    def _sampled(self, report: Sampled) -> None:
        batch, now = self._batch, self._time.time()
        assert batch is not None
        for completion, started in zip(report.completions, report.started, strict=True):
            j, sample = batch.end(completion)
            group = batch.groups[j]
            cut_off = completion.finish == FinishReason.LENGTH
            self.widen.ended(j, sample, tokens=len(completion.tokens), cut_off=cut_off)
            self._emit(
                SequenceEnded(
                    pipeline=self.name,
                    step=self.step,
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
            self._generate(report.worker, self.order.ended(report.worker, group=sampled_by, now=now))
            if group.ended:
                self._score(group)
        if batch.ended:
            self.widen.rollout_over()
            self._enter("score")
            self.collect_rewards()

    def _score(self, group: Group) -> None:
        count = len(group.completions)
        future = self._rewards.submit(
            self.name,
            step=self.step + 1,
            prompts=[group.example.prompt] * count,
            completions=group.texts,
            columns={name: [value] * count for name, value in group.example.columns.items()},
        )
        self._futures[future] = group
        future.add_done_callback(lambda _: self._wake())

    def collect_rewards(self) -> None:
        """Take the rewards that have come back; start training when all are there."""
        for future in [f for f in self._futures if f.done()]:
            group = self._futures.pop(future)
            try:
                group.rewards = future.result()
            except RewardError as error:
                self.fail(str(error))
                return
        if self.stage == "score" and self._batch is not None and self._batch.scored and self.widen.at_rest:
            unscored = sum(r is None for g in self._batch.groups for r in g.rewards or ())
            if unscored:
                self._note(
                    "warning", f"{self.name}: {unscored} samples of step {self.step + 1} have no reward: left out."
                )
            self._begin_training()

    # -- train and update -------------------------------------------------------------------------------------

    def _begin_training(self) -> None:
        config, batch = self.plan.config, self._batch
        assert batch is not None
        self._enter("train")
        groups = batch.train_groups(config.algorithm.scale_rewards)
        if not groups:
            self._finish_step()
            return
        self._totals, self._has_signal = totals(groups, config.rollout.max_tokens), True
        if config.algorithm.beta == 0:
            # Groups whose advantages are all 0 have no gradient; one is kept so that log-probs are still compared.
            signal = with_signal(groups)
            self._has_signal, groups = bool(signal), signal or groups[:1]
        self._plans = plan_micro_batches(groups, workers=self.workers, micro_tokens=config.train.micro_tokens)
        self._send_micro_batches()

    def _send_micro_batches(self) -> None:
        self._train_stats = {}
        self._waiting_for = set(range(self.workers))
        self._send_all(
            lambda worker: TrainBatches(
                pipeline=self.name,
                attempt=self.attempt,
                step=self.step,
                batches=tuple(self._plans[worker]),
                totals=self._totals,
            )
        )

    def _trained(self) -> None:
        if not self._has_signal:
            self._finish_step()  # not even the optimizer's momentum may move the weights
            return
        self._enter("update")
        self._waiting_for = set(range(self.workers))
        self._leases.ask(tuple(range(self.workers)), "update")

    def granted(self, lease: Lease) -> None:
        """A lease is here that was asked for: all its workers reduce and step, measure, or change their layout."""
        match lease.purpose:
            case "update":
                update = Update(pipeline=self.name, attempt=self.attempt, step=self.step, lease=lease)
                self._send_all(lambda _: update)
            case "profile" if not self.widen.wants_profile:
                self._leases.release(lease)
                self._waiting_for.clear()
                self._begin_step()
            case "profile":
                profile = Profile(
                    pipeline=self.name, attempt=self.attempt, lease=lease, degrees=self.widen.degrees, fine=False
                )
                self._send_all(lambda _: profile)
            case "switch":
                if self.widen.granted(lease, attempt=self.attempt):
                    self._dispatch()

    def _updated(self) -> None:
        self._iteration += 1
        if self._iteration < self.plan.config.algorithm.iterations:
            self._send_micro_batches()
        else:
            self._finish_step()

    def _finish_step(self) -> None:
        batch, config = self._batch, self.plan.config
        assert batch is not None
        update = self._update_stats if self._has_signal else None
        metrics = batch.metrics() | self.order.finish(batch) | self.widen.finish()
        metrics |= learning_metrics(self._train_stats, update) | self._clock.seconds()
        metrics["tokens_per_s"] = metrics["tokens"] / max(metrics["time_s"], 1e-9)
        self._emit(StepEnded(pipeline=self.name, step=self.step, metrics=metrics))
        self.step += 1
        self._batch, self._iteration = None, 0
        if self.step >= config.steps:
            self._ending = "finished"
        if self._ending:
            self._settle()
            return
        if self.step % config.checkpoint.every == 0 and not self.saver.busy:
            self._begin_save()
        self._begin_step()

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """On the way out: forget unfinished work, save what is not saved, then end."""
        assert self._ending is not None
        if self.saver.busy:
            return  # comes back here when that checkpoint is published
        if self._batch is not None or self.stage == "profile":
            self.attempt += 1
            self._abandon_work()
            self._send_all(lambda _: DropWork(pipeline=self.name, attempt=self.attempt))
        if self.stage in ("new", "load", "profile") or self.saver.last_step == self.step:
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
            self._enter("checkpoint")
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
        if self._ending and self._may_settle():
            self._settle()

    def _may_settle(self) -> bool:
        """Whether the weights are those of a whole step: not inside an update, nor between two of one step."""
        return self.stage != "update" and self._iteration == 0

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
            self._note("error", f"{self.name}: no checkpoint at step {self.step}: {error} Training goes on.")

    # -- small things -----------------------------------------------------------------------------------------

    def _enter(self, stage: str) -> None:
        self.stage = stage
        self._clock.enter(stage)
        self._emit(StageEntered(pipeline=self.name, step=self.step, stage=stage))

    def _send_all(self, command: Callable[[int], Command]) -> None:
        for worker in range(self.workers):
            self._send(worker, command(worker))

    def _note(self, level: str, message: str) -> None:
        self._emit(Note(level=level, message=message, pipeline=self.name))
