"""Where the requests of a step go, and what was learnt of lengths and of decode times when it is over.

The decision is the planner's (``planner/order.py``); here it gets its forecast and its costs, and is told to the log.
It changes no token and nothing that is learned: seeds do not depend on workers, and training sees groups in their own
order.

Invariant: only whole steps are learnt from, so a pipeline that falls back to a checkpoint forgets just the void ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from longtail.core.events import Event, MoveMade, Note, Span
from longtail.core.types import FinishReason, Layout, Request
from longtail.costs.decode import UNMEASURED, DecodeCosts, DecodeFit
from longtail.lengths.correlation import tau_b
from longtail.planner.dispatch import Dispatch
from longtail.planner.order import Placement, Work, fifo, place
from longtail.rl.tasks import Example
from longtail.runtime.forecast import Forecast, Forecaster
from longtail.runtime.live import KnownLengths, LiveLengths
from longtail.runtime.plan import PipelinePlan
from longtail.runtime.step import StepBatch

MOST_TRACKED = 1024
"""Prompts of a step for which the rank correlation is computed."""


@dataclass
class _Step:
    """One step under way: what is expected of it, how it was placed over the groups led by ``leaders``, which have the
    ``workers``, and when the last sample that each worker had a part in ended so far."""

    start: float
    work: Work | None
    forecast: Forecast | None
    leaders: list[int] = field(default_factory=list)
    workers: tuple[int, ...] = ()
    placement: Placement | None = None
    dispatch: Dispatch | None = None
    predicted_s: float | None = None
    last: dict[int, float] = field(default_factory=dict)


class StepOrder:
    """Decides for one pipeline over ``workers`` workers; ``emit`` is the controller's."""

    def __init__(self, plan: PipelinePlan, *, workers: int, emit: Callable[[Event], None]) -> None:
        self._name, self._config, self._kv_tokens = plan.name, plan.config, plan.kv_tokens
        self._workers, self._emit = workers, emit
        self._costs = DecodeFit()
        self._mode = plan.config.rollout.order
        self._forecaster: Forecaster | None = None
        weighed = plan.config.rollout.tp == "auto" or plan.company
        if self._mode == "ranked" or (workers > 1 and weighed):
            self._forecaster = Forecaster(
                max_tokens=plan.config.rollout.max_tokens,
                seed=plan.config.seed,
                ranker=plan.ranker if self._mode == "ranked" else None,
                note=self._warn,
            )
        self._step: _Step | None = None
        self._requests: list[Request] = []

    # -- a step -----------------------------------------------------------------------------------------------

    def begin(self, batch: StepBatch, requests: list[Request], *, now: float) -> Work | None:
        """What the step's requests are expected to take (None: nothing is known); ``now`` is the controller's time in
        seconds."""
        forecast, work = None, None
        samples = np.array([r.samples for r in requests])
        prompt_tokens = np.array([len(r.prompt) for r in requests])
        if self._forecaster is not None:
            examples = [group.example for group in batch.groups]
            group_size = self._config.algorithm.group_size
            forecast = self._forecaster.forecast(examples, group_size=group_size, step=batch.step)
        if self._lengths_known:
            lengths = np.array([n for r in requests for n in r.forced_lengths or ()])
            work = Work.known(samples, prompt_tokens, lengths)
        elif forecast is not None:
            work = forecast.work(samples, prompt_tokens)
        self._requests = requests
        self._step = _Step(start=now, work=work, forecast=forecast)
        return work

    def live(self, batch: StepBatch) -> LiveLengths | None:
        """How long the step's samples will still run, while they do; None if nothing is known."""
        step = self._step
        assert step is not None
        if self._config.rollout.tp == "oracle":
            return KnownLengths(np.array([n for group in batch.groups for n in group.forced_lengths or ()]))
        if self._forecaster is None or step.forecast is None:
            return None
        group_size = self._config.algorithm.group_size
        return self._forecaster.follow(step.forecast, group_size=group_size, step=batch.step)

    def dispatch(
        self, batch: StepBatch, layout: Layout, costs: Sequence[DecodeCosts] | None = None
    ) -> list[tuple[int, list[Request]]]:
        """(worker, what it gets first) for the leader of every group of ``layout``.

        ``costs`` are those of the groups, where they are known; of single workers they are learnt here.
        """
        step = self._step
        assert step is not None
        step.leaders, step.workers = [group[0] for group in layout.groups], layout.workers
        count = len(step.leaders)
        measured = costs or (self._learnt(step.leaders) if layout.degree == 1 else None)
        samples = np.array([r.samples for r in self._requests])
        slots = self._config.rollout.max_running
        if self._mode == "fifo" or step.work is None:
            step.placement = fifo(len(self._requests), count)
        else:
            slots = self._slots(step.work)
            step.placement = place(step.work, costs=measured or [UNMEASURED] * count, slots=slots)
            step.predicted_s = step.placement.makespan_s if measured else None
            believed = None if self._lengths_known else step.forecast
            self._tell(batch, step, believed, measured=measured is not None)
        step.dispatch = Dispatch(step.placement, samples=samples.tolist(), slots=slots)
        return [(w, [self._requests[r] for r in q]) for w, q in zip(step.leaders, step.dispatch.start(), strict=True)]

    def ended(self, worker: int, *, group: tuple[int, ...], now: float) -> list[Request]:
        """A sample of ``group``, led by ``worker``, has ended: what it gets next."""
        step = self._step
        assert step is not None
        assert step.dispatch is not None
        step.last.update(dict.fromkeys(group, now))
        if worker not in step.leaders:  # of a layout that came later, when all requests had been dispatched
            return []
        return [self._requests[r] for r in step.dispatch.ended(step.leaders.index(worker))]

    @property
    def all_dispatched(self) -> bool:
        """Whether every request of the step is with a worker."""
        return self._step is not None and self._step.dispatch is not None and self._step.dispatch.empty

    def rollout_over(self, batch: StepBatch) -> Callable[[], dict[str, float]]:
        """The last sample has ended: another rollout may begin. Returns what is to be called when the step is over: it
        learns from the step and gives its metrics (see docs/metrics)."""
        step, self._step, self._requests = self._step, None, []
        assert step is not None
        return partial(self._finish, step, batch)

    def _finish(self, step: _Step, batch: StepBatch) -> dict[str, float]:
        end = max(step.last.values())
        waits = [end - step.last.get(worker, step.start) for worker in {*step.workers, *step.last}]
        metrics = {"rollout_idle_s": sum(waits) / len(waits)}
        if step.predicted_s is not None:
            metrics["rollout_predicted_s"] = step.predicted_s
        if step.forecast is not None and self._forecaster is not None:
            completions = [[c for c in group.completions if c is not None] for group in batch.groups]
            lengths = np.array([[len(c.tokens) for c in row] for row in completions])
            censored = np.array([[c.finish == FinishReason.LENGTH for c in row] for row in completions])
            tau = rank_correlation(step.forecast.expected, lengths.mean(axis=1))
            if tau is not None:
                metrics["length_tau"] = tau
            self._forecaster.learn(step.forecast, lengths, censored)
        return metrics

    def abandon(self) -> None:
        """The step will not be finished."""
        self._step, self._requests = None, []

    # -- knowledge --------------------------------------------------------------------------------------------

    @property
    def _lengths_known(self) -> bool:
        """Whether decisions may use the lengths that responses will have."""
        return "oracle" in (self._mode, self._config.rollout.tp)

    @property
    def ranks(self) -> bool:
        """Whether prompts are ranked, so that it pays to name the next ones early."""
        return self._forecaster is not None and self._forecaster.ranks

    def look_ahead(self, examples: Sequence[Example]) -> None:
        """These come next."""
        if self._forecaster is not None:
            self._forecaster.look_ahead(examples)

    def remember(self, prompts: int) -> None:
        """Keep history of so many prompts (0: of none) from now on."""
        if self._forecaster is not None:
            self._forecaster.remember = prompts
            self._forecaster.forget()

    def observe(self, span: Span) -> None:
        """A span of this pipeline's work."""
        self._costs.observe(span)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores, as plain data."""
        lengths = self._forecaster.state_dict() if self._forecaster is not None else None
        return {"costs": self._costs.state_dict(), "lengths": lengths}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Know what was known when :meth:`state_dict` was called; None: nothing yet."""
        if self._forecaster is not None:
            self._forecaster.forget()
        if state is None:
            return
        try:
            self._costs.load_state_dict(state["costs"])
            if self._forecaster is not None and state["lengths"] is not None:
                self._forecaster.load_state_dict(state["lengths"])
        except Exception as error:  # of another version, or edited by hand: no reason to lose a run
            if self._forecaster is not None:
                self._forecaster.forget()
            self._warn(f"what the checkpoint knows of lengths cannot be used ({error}); they are learnt anew.")

    def _learnt(self, workers: Sequence[int]) -> list[DecodeCosts] | None:
        costs = self._costs.costs(self._workers)
        return None if costs is None else [costs[worker] for worker in workers]

    def _slots(self, work: Work) -> int:
        """How many sequences a worker decodes at once: what is allowed, or what its KV memory is expected to hold."""
        most = self._config.rollout.max_running
        if self._kv_tokens is None:
            return most
        lengths = work.lengths.astype(float)
        # Of the sequences that run at a moment, a longer one is met more often, on average half-way.
        generated = (lengths**2).mean() / (2 * lengths.mean())
        prompt = (work.prompt_tokens / work.samples).mean()
        return int(np.clip(self._kv_tokens / (generated + prompt), 1, most))

    # -- words ------------------------------------------------------------------------------------------------

    def _tell(self, batch: StepBatch, step: _Step, forecast: Forecast | None, *, measured: bool) -> None:
        placement = step.placement
        assert placement is not None
        self._emit(
            MoveMade(
                pipeline=self._name,
                step=batch.step,
                move="order",
                workers=list(step.workers),
                reason=f"{placement.rule}; {_source(len(batch.groups), forecast)}",
                predicted_gain_s=placement.fifo_s - placement.makespan_s if measured else None,
            )
        )

    def _warn(self, message: str) -> None:
        self._emit(Note(level="warning", message=f"{self._name}: {message}", pipeline=self._name))


def _source(prompts: int, forecast: Forecast | None) -> str:
    """Where the lengths come from, in words."""
    if forecast is None:
        return "lengths are given"
    ranked = forecast.quantiles is not None
    if forecast.remembered == 0:
        return f"{'ranker prior' if ranked else 'no ranker'}, no prompt with history"
    return f"{'ranker prior, ' if ranked else ''}{forecast.remembered} of {prompts} prompts with history"


def rank_correlation(predicted: np.ndarray, lengths: np.ndarray) -> float | None:
    """Kendall's tau-b; None where it has no meaning (all equal). Of very large steps only the first prompts count."""
    return tau_b(predicted[:MOST_TRACKED], lengths[:MOST_TRACKED]) if len(predicted) > 1 else None
