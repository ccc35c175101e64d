"""What the look-ahead chooses from, for each pipeline: where its next rollouts may begin, and what may be done with the
one under way; and what the simulation says about a choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longtail.costs.interference import Interference, model_of
from longtail.planner import fluid
from longtail.planner.alone import Alone, alone_rollout_s
from longtail.planner.cells import Cells
from longtail.planner.fluid import COLUMNS, Factors, Flow, flow
from longtail.planner.graph import CLASSES, TRAIN, Graph, StepWork, graph, step_work, train_work_s
from longtail.planner.merge import Alternative, Present, alternatives
from longtail.planner.remembered import Remembered
from longtail.planner.solo import Steps
from longtail.planner.state import ClusterState, PipelineState, Stage, StepShape
from longtail.planner.step_ahead import Begin, StepAhead, as_row, step_ahead, steps_of

HORIZON_STEPS = 2.0
"""The look-ahead goes so far that taking turns, each pipeline would have done so many steps."""
STAGES = {
    Stage.READY: fluid.READY,
    Stage.ROLLOUT: fluid.ROLLOUT,
    Stage.SCORE: fluid.SCORING,
    Stage.TRAIN: fluid.TRAINING,
    Stage.UPDATE: fluid.UPDATING,
}
STEPS, STEPS_OF_MANY, MANY = 3.0, 2.0, 16
"""When every pipeline has ended so many steps, the present one among them, enough has been seen; of more than
:data:`MANY` pipelines fewer, as the longest steps are a long time for the others."""
OVERLAP_STEPS = 8
"""From so many steps is seen what one takes alone that overlaps with others."""
EXPECTED_REST = 0.5
"""Of a wait or an update that is under way, so much is taken to be left."""


class Choice(NamedTuple):
    """Of each pipeline: where its next rollouts begin, which of its :attr:`Prospect.alternatives` is taken, and its
    weight."""

    begins: tuple[Begin, ...]
    nows: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass
class Prospect:
    """One pipeline with work to do, the ``index``-th of them."""

    state: PipelineState
    cells: Cells
    index: int
    widen: bool
    kinds: int
    """The first of its model's three kinds in the factors."""

    @cached_property
    def typical(self) -> StepAhead:
        """The steps to come."""
        return self._ahead(self.state.typical)

    @cached_property
    def step(self) -> StepAhead:
        """The present step, if it were to begin now."""
        return self.typical if self.state.step is self.state.typical else self._ahead(self.state.step)

    @property
    def alone(self) -> Alone:
        """A typical step, seconds by stage, with all workers to itself."""
        return self.typical.alone

    @cached_property
    def rest(self) -> Alone:
        """The same of what is left of it."""
        s, whole = self.state, self.step.alone
        match s.stage:
            case Stage.ROLLOUT:
                rollout_s = alone_rollout_s(
                    s.live, s.costs, self.steps, workers=self.cells.workers, slots=s.slots, widen=self.widen
                )
                return replace(whole, rollout_s=rollout_s)
            case Stage.SCORE:
                return replace(whole, rollout_s=0.0, score_s=EXPECTED_REST * whole.score_s)
            case Stage.TRAIN:
                train_s = train_work_s(s.train_left, s.costs) / self.cells.workers
                return replace(whole, rollout_s=0.0, score_s=0.0, train_s=train_s)
            case Stage.UPDATE:
                return Alone(0.0, 0.0, 0.0, EXPECTED_REST * whole.update_s)
        return whole

    @cached_property
    def micro_s(self) -> float:
        """The training that others may have to wait for."""
        return train_work_s(self.state.micro_tokens, self.state.costs)

    @cached_property
    def present(self) -> Present:
        return Present.of(self.state, self.cells.workers)

    @cached_property
    def rolls(self) -> bool:
        """Whether a rollout is under way."""
        return len(self.state.live) > 0

    @cached_property
    def at(self) -> np.ndarray:
        """[C]: 1 where its present or last rollout is."""
        at = np.zeros(self.cells.count)
        at[self.cells.of(np.array(self.state.workers, np.int64))] = 1.0
        return at

    @cached_property
    def steps(self) -> Steps:
        """Decode steps, up to the batches that there can be."""
        s = self.state
        most = max(len(s.live), len(s.typical.lengths), len(s.step.lengths), 1)
        return steps_of(s.costs, min(s.slots, most), self.cells.workers)

    def work(self, begin: Begin, *, now: bool = False) -> StepWork:
        """A step as the sub-stage graph has it."""
        ahead = self.step if now else self.typical
        return step_work(ahead.shape, self.state.costs, ahead.parts(begin.cells, begin.merged), begin.first)

    def about(self) -> np.ndarray:
        """Its row of :func:`~longtail.planner.fluid.flow`'s ``about``."""
        s, rest, typical = self.state, self.rest, self.alone
        now, then = self.step.work, self.typical.work
        row = np.zeros(COLUMNS)
        row[fluid.STAGE] = STAGES[s.stage]
        row[fluid.STEPS], row[fluid.STALE], row[fluid.ELAPSED] = s.steps_left, s.stale_steps, s.elapsed_s
        row[fluid.LIVE] = float(self.rolls and STAGES[s.stage] >= fluid.SCORING)
        train_now_s = train_work_s(s.train_left, s.costs) if s.stage is Stage.TRAIN else now.logprob_s + now.train_s
        row[fluid.SCORE_NOW], row[fluid.TRAIN_NOW], row[fluid.UPDATE_NOW] = rest.score_s, train_now_s, rest.update_s
        row[fluid.SCORE], row[fluid.TRAIN], row[fluid.UPDATE] = (
            then.score_s,
            then.logprob_s + then.train_s,
            then.update_s,
        )
        row[fluid.QUANTUM], row[fluid.KIND_TRAIN] = self.micro_s, self.kinds + TRAIN
        row[fluid.WORTH_NOW], row[fluid.WORTH] = (max(a.total_s, 1e-9) for a in (rest, typical))
        for first, a in ((fluid.ROLLOUT_PART_NOW, rest), (fluid.ROLLOUT_PART, typical)):
            total_s = max(a.total_s, 1e-9)
            row[first], row[first + 1], row[first + 2] = a.rollout_s / total_s, a.score_s / total_s, a.train_s / total_s
        return row

    def alternative_row(self, alternative: Alternative) -> np.ndarray:
        return as_row(alternative.parts, self.cells.count, self.kinds)

    def _ahead(self, shape: StepShape) -> StepAhead:
        s = self.state
        return step_ahead(
            shape, s.costs, self.steps, self.cells,
            slots=s.slots, widen=self.widen, kinds=self.kinds, index=self.index,
        )  # fmt: skip


class Outlook:
    """All pipelines that have work, and the simulation of choices between what they may do."""

    def __init__(self, state: ClusterState, *, merges: bool, spreads: bool = True) -> None:
        """``merges``, ``spreads``: whether rollouts under way may be moved to fewer, to more workers."""
        working = [p for p in state.pipelines if p.steps_left > 0]
        self.cells = Cells.over(state.workers, len(working))
        self.merges, self.spreads = merges, spreads
        models = sorted({model_of(p.costs.key) for p in working})
        self.prospects = [
            Prospect(p, self.cells, i, p.may_widen, len(CLASSES) * models.index(model_of(p.costs.key)))
            for i, p in enumerate(working)
        ]
        self.priorities = np.array([p.priority for p in working])
        self._mean_priority = float(self.priorities.mean())
        known = state.interference
        self.factors = _FACTORS.of((known,), tuple(models), lambda: _factors(known, models))
        self._about = np.stack([prospect.about() for prospect in self.prospects])
        for i, prospect in enumerate(self.prospects):
            if prospect.state.stale_steps > 0:
                self._overlap(i, prospect)
        self.horizon_s = HORIZON_STEPS * float(self._about[:, fluid.WORTH].sum())
        self.enough = STEPS if len(working) <= MANY else STEPS_OF_MANY
        self._flows: dict[Choice, Flow] = {}
        self._values: dict[Choice, float] = {}
        self.alternatives = self._find_alternatives()
        self._rows_now = [
            [p.alternative_row(a) for a in found] for p, found in zip(self.prospects, self.alternatives, strict=True)
        ]
        self._now, self._then = np.zeros((2, len(working), 2, 3, self.cells.count))
        self._laid_out: list[tuple[Begin, int] | None] = [None] * len(working)

    @property
    def simulations(self) -> int:
        """How many choices have been simulated."""
        return len(self._flows)

    def flow(self, choice: Choice) -> Flow:
        """What comes of it."""
        found = self._flows.get(choice)
        if found is None:
            self._lay_out(choice)
            weights = np.array(choice.weights)
            found = flow(
                self._now, self._then, self._about, weights, self.cells.sizes, self.factors, self.horizon_s, self.enough
            )
            self._flows[choice] = found
        return found

    def value(self, choice: Choice) -> float:
        """Work done by priority over that of taking turns, in which one second is worth one second."""
        value = self._values.get(choice)
        if value is None:
            done = self.flow(choice)
            value = float(self.priorities @ done.done) / (max(done.seconds, 1e-9) * self._mean_priority)
            self._values[choice] = value
        return value

    def rates(self, choice: Choice) -> dict[str, float]:
        """Progress of each pipeline, while it has work, as a share of what it would make alone."""
        done = self.flow(choice)
        seconds = np.minimum(done.finished, done.seconds)
        rates = done.done / np.maximum(seconds, 1e-9)
        return {p.state.name: float(rate) for p, rate in zip(self.prospects, rates, strict=True)}

    def turns(self) -> dict[str, float]:
        """The same when steps take turns."""
        seconds = [p.alone.total_s for p in self.prospects]
        return {p.state.name: s / max(sum(seconds), 1e-9) for p, s in zip(self.prospects, seconds, strict=True)}

    def graph(self, i: int, begin: Begin, steps: int = 2) -> Graph:
        """The sub-stage graph of the next steps of pipeline ``i`` whose rollouts begin like this."""
        prospect = self.prospects[i]
        works = [prospect.work(begin, now=step == 0) for step in range(steps)]
        return graph(prospect.state.name, works, self.cells.sizes, stale=prospect.state.stale_steps)

    def _lay_out(self, choice: Choice) -> None:
        """Its rollouts, in ``_now`` and ``_then``: those that are other than in the choice before."""
        for i, laid_out in enumerate(zip(choice.begins, choice.nows, strict=True)):
            if laid_out != self._laid_out[i]:
                prospect, (begin, now) = self.prospects[i], laid_out
                self._now[i] = self._rows_now[i][now] if prospect.rolls else prospect.step.row(begin)
                self._then[i] = prospect.typical.row(begin)
                self._laid_out[i] = laid_out

    def _find_alternatives(self) -> list[list[Alternative]]:
        """Of each rollout under way."""
        found: list[list[Alternative]] = [[] for _ in self.prospects]
        everywhere = Begin(0, self.cells.count, False)
        crowds = np.stack([self._crowd(prospect, everywhere) for prospect in self.prospects])
        waits = [p.micro_s if p.state.stage is Stage.TRAIN else 0.0 for p in self.prospects]
        for i, prospect in enumerate(self.prospects):
            if prospect.rolls:
                others = crowds.sum(axis=0) - crowds[i]
                found[i] = alternatives(
                    prospect.state,
                    prospect.present,
                    prospect.steps,
                    self.cells,
                    crowd=np.repeat(others, np.diff(self.cells.bounds)),
                    wait_s=0.5 * max((w for j, w in enumerate(waits) if j != i), default=0.0),
                    merges=self.merges,
                    spreads=self.spreads,
                    offset=i,
                )
        return found

    def _crowd(self, prospect: Prospect, everywhere: Begin) -> np.ndarray:
        """[C]: the part of each cell's time that the pipeline wants: now, if a rollout of it is under way."""
        if not prospect.rolls:
            return prospect.typical.density(everywhere)
        on = np.bincount(prospect.present.worker, minlength=self.cells.workers) > 0
        return np.add.reduceat(on.astype(float), self.cells.bounds[:-1]) / self.cells.sizes

    def _overlap(self, i: int, prospect: Prospect) -> None:
        """A pipeline that may be stale rolls out while it trains: what its steps take alone is less than their sum."""
        all_cells = Begin(0, self.cells.count, False)
        row, about = prospect.typical.row(all_cells)[None], self._about[i : i + 1].copy()
        steps = OVERLAP_STEPS + prospect.state.stale_steps
        about[0, [fluid.STAGE, fluid.STEPS, fluid.LIVE]] = fluid.READY, steps, 0.0
        far_s = 2.0 * steps * float(about[0, fluid.WORTH])
        done = flow(row, row, about, np.ones(1), self.cells.sizes, self.factors, far_s, steps)
        if np.isfinite(done.finished[0]) and (ratio := float(done.finished[0]) / (steps * about[0, fluid.WORTH])) < 1.0:
            self._about[i, [fluid.WORTH_NOW, fluid.WORTH]] *= ratio


def _factors(interference: Interference, models: list[str]) -> Factors:
    works = [(model, str(kind)) for model in models for kind in CLASSES]
    if not interference.same and not interference.neighbour:
        n = len(works)
        return Factors(np.ones((3, n, n)), np.ones((n, n)), False)
    same = np.ascontiguousarray(
        np.array([[interference.shared(a, b) for b in works] for a in works]).transpose(2, 0, 1)
    )
    near = np.array([[interference.factor(a, b, on="neighbour") for b in works] for a in works])
    return Factors(same, near, bool((same != 1.0).any() or (near != 1.0).any()))


_FACTORS = Remembered[Factors](4)
