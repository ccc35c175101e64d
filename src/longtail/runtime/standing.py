"""How a pipeline stands, in the planner's words: the present step, those to come, and what a step would take alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longtail.planner.alone import alone_s
from longtail.planner.state import Live, PipelineState, Stage, StepShape
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.rollout_phase import StepUnderWay
from longtail.runtime.samples import NOBODY
from longtail.runtime.schedule import Schedule
from longtail.runtime.shape import like, trained_shape
from longtail.runtime.train_phase import TrainPhase
from longtail.runtime.widen import StepWiden


class Standing:
    """Of one pipeline over ``workers`` workers. The last step that is over is taken for typical of those to come."""

    def __init__(self, plan: PipelinePlan, widen: StepWiden, *, workers: int) -> None:
        self._plan, self._widen, self._workers = plan, widen, workers
        self._typical: StepShape | None = None
        self._last_live: tuple[int, Live] | None = None
        """The step it is of, and the live samples when all had been heard of last."""

    def finished(self, step: StepUnderWay, training: TrainPhase, metrics: Mapping[str, float]) -> dict[str, float]:
        """``step`` is over. Returns ``alone_s``, what it would have taken with all workers to itself, and by how much
        longer it took; nothing as long as costs are unknown."""
        assert step.shape is not None
        shape = trained_shape(
            step.shape,
            self._plan.config,
            train_tokens=training.tokens,
            score_s=metrics["score_s"],
            update_s=training.update_s,
        )
        self._typical = shape
        costs, slots = self._widen.costs, self._plan.config.rollout.max_running
        if costs is None:
            return {}
        seconds = alone_s(shape, costs, workers=self._workers, slots=slots, widen=self._widens)
        return {"alone_s": seconds, "slowdown": metrics["time_s"] / seconds} if seconds > 0 else {}

    def state(
        self, stage: str, schedule: Schedule, now: StepUnderWay | None, *, elapsed_s: float, training: TrainPhase
    ) -> PipelineState | None:
        """In the step ``now`` (None: between two) since ``elapsed_s``; None as long as nothing is known of costs or
        steps."""
        costs = self._widen.costs
        shape = now.shape if now is not None else None
        if shape is not None and self._typical is not None:
            shape = like(shape, self._typical, self._plan.config)
        shape = shape or self._typical
        if costs is None or shape is None:
            return None
        config = self._plan.config
        return PipelineState(
            name=self._plan.name,
            priority=config.priority,
            max_slowdown=config.max_slowdown,
            stage=Stage(stage),
            steps_left=schedule.steps - schedule.trained,
            elapsed_s=elapsed_s,
            step=shape,
            typical=self._typical or shape,
            live=self._live(now, shape) if stage == Stage.ROLLOUT and now is not None else NOBODY,
            workers=self._widen.workers,
            degree=self._widen.degree,
            train_left=_train_left(stage, shape, training),
            merges_left=self._widen.merges_left,
            costs=costs,
            slots=config.rollout.max_running,
            may_widen=self._widens,
            stale_steps=schedule.staleness,
            micro_tokens=config.train.micro_tokens,
        )

    @property
    def _widens(self) -> bool:
        return self._plan.may_widen and isinstance(self._plan.config.rollout.tp, str) and len(self._widen.degrees) > 1

    def _live(self, now: StepUnderWay, shape: StepShape) -> Live:
        """Where some have not been heard of, what was known last; at first nobody has begun."""
        live = self._widen.live_samples()
        if live is not None:
            self._last_live = now.step, live
        elif self._last_live is not None and self._last_live[0] == now.step:
            live = self._last_live[1]
        else:
            nothing = np.zeros(len(shape.lengths), np.int64)
            live = Live(worker=nothing - 1, context=shape.prompts, lanes=nothing, remaining=shape.lengths)
        return live


def _train_left(stage: str, shape: StepShape, training: TrainPhase) -> int:
    """Tokens still to be trained on in the present step; where its rollout is ahead, in the step before it too."""
    if training.at == "nothing":
        return shape.train_tokens
    return training.tokens_left + (shape.train_tokens if stage == Stage.ROLLOUT else 0)
