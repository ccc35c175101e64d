"""What is decided about tensor-parallel groups (``planner/widen.py``, ``start.py``, ``release.py``), as moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from longtail.core.config import Rollout as RolloutConfig
from longtail.core.types import Layout
from longtail.costs.table import CostTable
from longtail.planner.order import Work
from longtail.planner.release import worth_keeping
from longtail.planner.rollout import Rollout
from longtail.planner.start import start_layout
from longtail.planner.tree import Group
from longtail.planner.widen import Action, Auto, Policy, Threshold, decide, predicted_end_s
from longtail.runtime.moves import Move
from longtail.runtime.samples import StepSamples, inside


@dataclass(frozen=True)
class Rules:
    """By which it is decided: the job's policy, and how many sequences a group of each degree runs at once."""

    policy: Policy
    slots: Mapping[int, int]

    @classmethod
    def of(cls, config: RolloutConfig, degrees: Collection[int]) -> Rules:
        threshold = config.tp_threshold
        return cls(Auto() if threshold is None else Threshold(threshold), dict.fromkeys(degrees, config.max_running))


def fixed_start(degree: int, workers: int, *, now: float) -> Move | None:
    """To groups of ``degree`` before the rollout begins; None: every worker on its own."""
    layout = Layout.uniform(workers, degree)
    return None if layout.degree == 1 else _to_begin(layout, f"tp: {degree}", now)


def planned_start(
    work: Work, samples: StepSamples, workers: int, costs: CostTable, rules: Rules, *, now: float
) -> Move | None:
    """To the layout in which the rollout is predicted to end first; None: every worker on its own."""
    start = start_layout(work, workers, rules.slots, costs, rules.policy)
    if start.degree == 1:
        return None
    times = ", ".join(f"TP{degree} {seconds:.3g} s" for degree, seconds in start.predicted_s.items())
    move = _to_begin(start.layout, f"predicted for the whole rollout: {times}", now)
    move.rest_s, move.cost_s = start.predicted_s[start.degree], costs.switch.handshake_s
    move.gain_s = start.predicted_s[1] - move.rest_s + move.cost_s

    def without_s(table: CostTable) -> float:
        known = Work.known(work.samples, work.prompt_tokens, samples.tokens[samples.in_order])
        return start_layout(known, workers, rules.slots, table, rules.policy).predicted_s[1]

    move.without_s = without_s
    return move


def _to_begin(layout: Layout, reason: str, now: float) -> Move:
    groups = tuple(group for group in layout.groups if len(group) > 1)
    return Move("widen", groups, reason=reason, decided=now)


def next_move(
    rollout: Rollout,
    numbers: np.ndarray,
    samples: StepSamples,
    costs: CostTable,
    rules: Rules,
    refused: Collection[tuple[Group, ...]],
    *,
    now: float,
) -> Move | str | None:
    """What the planner would do now with ``rollout``, whose samples have these ``numbers``; or why it would do nothing,
    where it says so."""
    held = None
    for decision in decide(rollout, costs, rules.policy):
        if decision.action == Action.HOLD:
            held = decision.reason
        elif decision.after not in refused:
            return Move(
                decision.action.value,
                decision.after,
                reason=decision.reason,
                gain_s=decision.predicted_gain_s,
                cost_s=decision.predicted_cost_s,
                rest_s=decision.finish_then_s,
                without_s=_hindsight(rollout, numbers, samples, decision.before),
                samples=numbers[inside(rollout, decision.before)],
                decided=now,
            )
    return held


def release(
    rollout: Rollout, numbers: np.ndarray, costs: CostTable, refused: Collection[tuple[Group, ...]], *, now: float
) -> Move | None:
    """Others have work for the workers of wide groups: let one go whose tail is not worth their waiting."""
    for group in rollout.groups:
        if len(group) == 1:
            continue
        singles = tuple((worker,) for worker in group)
        own = inside(rollout, (group,))
        if not own.any():
            why = "its samples have ended, and others wait"
            return Move("narrow", singles, reason=why, samples=numbers[own], decided=now)
        if singles not in refused:
            verdict = worth_keeping(rollout, group, costs, waiting=1.0)
            if not verdict.keep:
                return Move(
                    "narrow",
                    singles,
                    reason=f"others wait for these workers: {verdict.reason}",
                    cost_s=verdict.switch_s,
                    rest_s=verdict.narrow_s + verdict.switch_s,
                    samples=numbers[own],
                    decided=now,
                )
    return None


def _hindsight(
    rollout: Rollout, numbers: np.ndarray, samples: StepSamples, groups: tuple[Group, ...]
) -> Callable[[CostTable], float]:
    """The seconds that ``groups`` would have taken from here on as they were, with the lengths that came out."""
    return lambda table: predicted_end_s(samples.as_it_came(rollout, numbers, groups), table)
