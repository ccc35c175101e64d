"""How the pipelines of a run share its workers, decided anew whenever something changes.

The decisions are the planner's (``planner/lookahead.py``); here it is told how far every pipeline is, and what it
decides is carried out: on which workers each rollout begins, which samples move, by which weights workers share their
time, who may form tensor-parallel groups, and whether pipelines run side by side at all. None of it changes what is
learned.

Invariants: with one pipeline left nothing is decided, and it has everything; a pipeline of which nothing is known yet
(its costs are not measured) counts as one that needs all workers; on a virtual clock, which stands still meanwhile,
thinking takes no time, so that equal runs have equal decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from longtail.cluster.messages import Command, Shares
from longtail.core.clock import Clock
from longtail.core.config import SharingPolicy
from longtail.core.events import Event, Planned, Span, StepEnded
from longtail.costs.interference_log import InterferenceLog
from longtail.planner.lookahead import in_general, share
from longtail.planner.state import ClusterState, Mode, PipelineState, Sharing, Stage
from longtail.runtime.known_costs import KnownCosts
from longtail.runtime.turns import By, Turns
from longtail.runtime.widen import THINKING_SHARE

if TYPE_CHECKING:
    from longtail.runtime.pipeline import PipelineDriver

LOOK_EVERY_S = 0.2
"""Between two looks at rollouts under way; whatever changes of stage is looked at at once."""
BUDGET_S = 0.05
SAME_WEIGHT = 0.05
"""Weights that differ by less are left as they are."""
TELL_EVERY_S = 10.0
DISTRUST = math.log(1.5)
"""Mean error of predicted speeds, as a logarithm, above which the planner is not to look ahead."""
ERROR_MEMORY = 0.7
IDLE_STAGES = ("new", "score")
"""In which a pipeline needs no worker."""


class Conductor:
    """For the pipelines ``drivers`` (which come and go) on ``workers`` workers; the rest is the controller's."""

    def __init__(
        self,
        *,
        drivers: Mapping[str, PipelineDriver],
        workers: int,
        policy: SharingPolicy,
        turns: Turns,
        send: Callable[[int, Command], None],
        emit: Callable[[Event], None],
        clock: Clock = time,
    ) -> None:
        self._drivers, self._workers, self._policy, self._turns = drivers, workers, policy, turns
        self._send, self._emit, self._clock = send, emit, clock
        self._interference = InterferenceLog(self._own_costs)
        self._sharing: Sharing | None = None
        self._general: Sharing | None = None
        """What was decided of typical steps, when those of ``_typical`` were over."""
        self._typical: tuple[tuple[str, int], ...] = ()
        self._unknown: frozenset[str] = frozenset()
        self._weights: dict[str, float] = {}
        self._seen: tuple[tuple[str, int, str], ...] = ()
        self._look_at = self._told_at = 0.0
        self._errors: dict[str, float] = {}
        self._shared_since = math.inf
        """Since when pipelines have been side by side; infinite while they take turns."""

    # -- what the controller asks and tells -------------------------------------------------------------------

    def contended(self, pipeline: str) -> bool:
        """Whether others need the workers, so that ``pipeline`` must not have some of them to itself."""
        others = [d for d in self._live() if d.name != pipeline]
        if any(d.stage not in IDLE_STAGES and not self._turns.waits(d.name) for d in others):
            return True
        # Now none of them does; whether one will soon is the planner's guess.
        sharing = self._sharing
        if not others or sharing is None or sharing.mode is Mode.HOLD:
            return False
        return pipeline not in sharing.widens

    def observe(self, event: Event) -> None:
        """A span of any pipeline's work, or the end of a step: what it says of predictions."""
        if isinstance(event, Span):
            self._interference.observe(event)
        elif isinstance(event, StepEnded) and self._sharing is not None:
            predicted, slowdown = self._sharing.rates.get(event.pipeline), event.metrics.get("slowdown")
            side_by_side = self._clock.time() - event.metrics["time_s"] >= self._shared_since
            # Where nothing was foretold, what is known of errors fades: some day predictions are tried again. Turns
            # make single steps long or short as they happen to fall.
            error = abs(math.log(predicted * slowdown)) if predicted and slowdown and side_by_side else None
            before = self._errors.get(event.pipeline, error)
            if before is not None:
                self._errors[event.pipeline] = ERROR_MEMORY * before + (1.0 - ERROR_MEMORY) * (error or 0.0)

    def turn(self) -> None:
        """Decide, if something has changed or it is time to look at the rollouts again."""
        live = self._live()
        self._forget_others(live)
        if len(live) < 2 and self._sharing is None:
            return  # it has everything
        seen = tuple((d.name, d.step, d.stage) for d in live)
        now = self._clock.monotonic()
        if seen == self._seen and now < self._look_at:
            return
        self._seen = seen
        states = {d.name: d.state(self._clock.time()) for d in live}
        self._unknown = frozenset(name for name, state in states.items() if state is None)
        known = tuple(state for state in states.values() if state is not None)
        if known:
            sharing = self._decide(known)
            self._carry_out(sharing, now, seconds=self._clock.monotonic() - now)
        if len(live) < 2 and all(
            s is None or s.stage is not Stage.ROLLOUT or self._everywhere(s) for s in states.values()
        ):
            self._alone(live)
        self._look_at = now + max(LOOK_EVERY_S, THINKING_SHARE * (self._clock.monotonic() - now))

    def _own_costs(self, pipeline: str) -> KnownCosts | None:
        driver = self._drivers.get(pipeline)
        return driver.widen.known if driver is not None else None

    # -- deciding and carrying out ----------------------------------------------------------------------------

    def _live(self) -> list[PipelineDriver]:
        """Those that have steps to do."""
        return [d for d in self._drivers.values() if not d.over and d.stage != "checkpoint"]

    def _decide(self, known: tuple[PipelineState, ...]) -> Sharing:
        state = ClusterState(workers=self._workers, pipelines=known, interference=self._interference.current())
        # With a pipeline of which nothing is known nothing can be foretold: side by side, as it comes.
        ask = partial(
            share,
            corun="greedy" if self._unknown else self._policy.corun,
            merge=self._policy.merge == "auto",
            budget_s=BUDGET_S,
            trust=self._trusted,
            clock=self._clock.monotonic,
        )
        typical = tuple((p.name, p.steps_left) for p in known)
        if self._general is None or typical != self._typical:
            self._typical, self._general = typical, ask(in_general(state), before=self._general)
        if self._general.mode is Mode.HOLD:
            return self._general
        return ask(state, before=self._sharing, may_hold=False)

    @property
    def _trusted(self) -> bool:
        live = [self._errors[d.name] for d in self._live() if d.name in self._errors]
        return not live or sum(live) / len(live) < DISTRUST

    def _carry_out(self, sharing: Sharing, now: float, seconds: float) -> None:
        before, self._sharing = self._sharing, sharing
        if sharing.mode is Mode.HOLD:
            self._shared_since = math.inf
        elif self._shared_since == math.inf:
            self._shared_since = self._clock.time()
        for driver in self._live():
            driver.begin_on = sharing.begin.get(driver.name)
        self._share_time(sharing.weights)
        self._turns.change(By.STAGE if sharing.mode is Mode.HOLD else By.NOTHING)
        for relocation in sharing.relocations:
            if relocation.pipeline in self._drivers:
                self._drivers[relocation.pipeline].relocate(relocation)
        changed = before is None or (before.mode, before.begin) != (sharing.mode, sharing.begin)
        if changed or now >= self._told_at + TELL_EVERY_S:
            self._told_at = now
            self._emit(
                Planned(
                    mode=sharing.mode.value,
                    reason=sharing.reason,
                    rates=dict(sharing.rates),
                    weights=dict(self._weights),
                    duration_s=seconds,
                )
            )

    def _share_time(self, weights: Mapping[str, float]) -> None:
        changed = {
            name: weight
            for name, weight in weights.items()
            if abs(weight / self._weights.setdefault(name, self._drivers[name].plan.config.priority) - 1.0)
            > SAME_WEIGHT
        }
        if changed:
            self._weights |= changed
            command = Shares(weights=tuple(changed.items()))
            for worker in range(self._workers):
                self._send(worker, command)

    def _everywhere(self, state: PipelineState) -> bool:
        """Whether its rollout has all workers."""
        return len(state.workers) * state.degree >= self._workers

    def _forget_others(self, live: list[PipelineDriver]) -> None:
        """What is known of pipelines that are gone: another one may come by the same name."""
        names = {driver.name for driver in live}
        for known in (self._errors, self._weights):
            for name in known.keys() - names:
                del known[name]
        self._interference.keep(names)

    def _alone(self, live: list[PipelineDriver]) -> None:
        """At most one pipeline is left, and from now on it has everything."""
        self._sharing, self._general, self._seen, self._shared_since = None, None, (), math.inf
        for driver in live:
            driver.begin_on = None
        self._turns.change(By.NOTHING)
