"""How a pipeline stands, in the planner's words: the present step, those to come, and what a step would take alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from longtail.core.types import SLICE_S
from longtail.costs.table import CostTable
from longtail.planner.alone import alone_s
from longtail.planner.outlook import HORIZON_STEPS, Outlook
from longtail.planner.remembered import Remembered
from longtail.planner.state import ClusterState, Live, PipelineState, Stage, StepShape
from longtail.rl.packing import usual_tokens
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.rollout_phase import StepUnderWay
from longtail.runtime.samples import NOBODY
from longtail.runtime.schedule import Schedule
from longtail.runtime.shape import like, trained_shape
from longtail.runtime.train_phase import TrainPhase
from longtail.runtime.widen import StepWiden

MOST_STEPS_UNDER_WAY = 8
"""Of so many steps at most the shapes are kept."""


class Standing:
    """Of one pipeline over ``workers`` workers. The last step that is over is taken for typical of those to come."""

    def __init__(self, plan: PipelinePlan, widen: StepWiden, *, workers: int) -> None:
        self._plan, self._widen, self._workers = plan, widen, workers
        self._typical: StepShape | None = None
        self._likes = Remembered[StepShape](MOST_STEPS_UNDER_WAY)
        self._last_live: tuple[int, Live] | None = None
        """The step it is of, and the live samples when all had been heard of last."""

    def finished(
        self,
        step: StepUnderWay,
        schedule: Schedule,
        training: TrainPhase,
        *,
        score_s: float,
        took_s: float,
        overlaps: bool,
    ) -> dict[str, float]:
        """``step`` is over, after ``took_s``: if it ``overlaps`` with others, since the end of the one before. Returns
        ``alone_s``, what it would have taken with all workers to itself, counted in the same way, and by how much
        longer it took; nothing as long as costs are unknown."""
        assert step.shape is not None
        shape = trained_shape(
            step.shape,
            self._plan.config,
            train_tokens=training.tokens,
            score_s=score_s,
            update_s=training.update_s,
        )
        self._typical = shape
        costs = self._widen.costs
        if costs is None:
            return {}
        seconds = self._alone_s(shape, costs, schedule if overlaps else None)
        return {"alone_s": seconds, "slowdown": took_s / seconds} if seconds is not None and seconds > 0 else {}

    def _alone_s(self, shape: StepShape, costs: CostTable, overlaps: Schedule | None) -> float | None:
        """Of a step that ``overlaps`` with others as its pipeline's schedule has it (None: with none)."""
        degree, slots = self._widen.fixed_degree, self._plan.config.rollout.max_running
        if degree > 1:  # its groups have the workers to themselves: nothing overlaps
            if degree not in costs.degrees:
                return None
            only = replace(costs, decode={degree: costs.decode[degree]})
            return alone_s(shape, only, workers=self._workers, slots=slots, widen=True)
        if overlaps is None:
            return alone_s(shape, costs, workers=self._workers, slots=slots, widen=self._widen.widens)
        state = self._state(
            Stage.READY, overlaps, costs, step=shape, typical=shape, live=NOBODY, elapsed_s=0.0, train_left=0
        )
        outlook = Outlook(ClusterState(workers=self._workers, pipelines=(replace(state, steps_left=1),)), merges=False)
        return outlook.horizon_s / HORIZON_STEPS

    def state(
        self,
        stage: str,
        schedule: Schedule,
        now: StepUnderWay | None,
        sampled: StepUnderWay | None,
        *,
        elapsed_s: float,
        training: TrainPhase,
    ) -> PipelineState | None:
        """The oldest step under way, ``now`` (None: between two), is at ``stage``, and has been since ``elapsed_s``;
        ``sampled`` is the one whose rollout is under way, the same or a later one. None as long as nothing is known of
        costs or steps."""
        costs, step = self._widen.costs, self._shape(now)
        if costs is None or step is None:
            return None
        return self._state(
            Stage(stage),
            schedule,
            costs,
            step=step,
            typical=self._typical or step,
            live=NOBODY if sampled is None or sampled.ended else self._live(sampled, self._shape(sampled) or step),
            elapsed_s=elapsed_s,
            train_left=step.train_tokens if training.at == "nothing" else training.tokens_left,
        )

    def _state(
        self,
        stage: Stage,
        schedule: Schedule,
        costs: CostTable,
        *,
        step: StepShape,
        typical: StepShape,
        live: Live,
        elapsed_s: float,
        train_left: int,
    ) -> PipelineState:
        config = self._plan.config
        return PipelineState(
            name=self._plan.name,
            priority=config.priority,
            max_slowdown=config.max_slowdown,
            stage=stage,
            steps_left=schedule.steps - schedule.trained,
            elapsed_s=elapsed_s,
            step=step,
            typical=typical,
            live=live,
            workers=self._widen.workers,
            degree=self._widen.degree,
            train_left=train_left,
            merges_left=self._widen.merges_left,
            costs=costs,
            slots=config.rollout.max_running,
            may_widen=self._widen.widens,
            stale_steps=schedule.staleness,
            micro_tokens=self._quantum_tokens(typical, costs),
        )

    def _quantum_tokens(self, typical: StepShape, costs: CostTable) -> int:
        """Of the training that others may have to wait for: a micro-batch, or a slice of it."""
        config = self._plan.config
        usual = usual_tokens(
            typical.train_tokens // config.algorithm.iterations,
            workers=self._workers,
            micro_tokens=config.train.micro_tokens,
        )
        if not self._plan.slices or not costs.train_token_s:
            return usual
        return min(usual, round(SLICE_S / costs.train_token_s))

    def _shape(self, step: StepUnderWay | None) -> StepShape | None:
        """Of ``step``, with what comes after its rollout as it was last; where nothing is known of it, or of no step,
        what is typical."""
        shape = step.shape if step is not None else None
        if shape is not None and self._typical is not None:
            typical, config = self._typical, self._plan.config
            return self._likes.of((shape, typical), (), lambda: like(shape, typical, config))
        return shape or self._typical

    def _live(self, sampled: StepUnderWay, shape: StepShape) -> Live:
        """Where some have not been heard of, what was known last; at first nobody has begun."""
        live = self._widen.live_samples()
        if live is not None:
            self._last_live = sampled.step, live
        elif self._last_live is not None and self._last_live[0] == sampled.step:
            live = self._last_live[1]
        else:
            nothing = np.zeros(len(shape.lengths), np.int64)
            live = Live(worker=nothing - 1, context=shape.prompts, lanes=nothing, remaining=shape.lengths)
        return live
