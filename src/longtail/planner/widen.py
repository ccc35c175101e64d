"""Widen: when should the groups of a rollout become wider, or narrow again?

While a rollout's batch is large, workers on their own (data parallel) or in narrow tensor-parallel groups get most out
of each step; when few sequences are left, wide groups make their steps short. :func:`decide` looks at a frozen
:class:`~longtail.planner.rollout.Rollout` and says for each block of neighbouring workers what to do now. Under
:class:`Auto` it compares predicted ends (``plans.py``) and switches only if the gain is above the cost by a margin
*and* no later moment is better, as in PAT (arXiv 2605.23945), but from distributions of lengths. :class:`Threshold` is
the rule of DynRL, to compare with.

Pure and deterministic: equal arguments give equal decisions. Degrees that the cost table does not know are never
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.plans import Move, Plan, best_plan, worth_a_look
from longtail.planner.rollout import NOW, Block, Costs, Rollout
from longtail.planner.tree import Group, Tree, halves

MOST_WORK = 1024
"""Outcomes are taken until they hold about so many sequences, so that a decision stays in milliseconds."""
LEAST_OUTCOMES = 4


@dataclass(frozen=True)
class Auto:
    """Switch when that is predicted to end the rollout earlier."""


@dataclass(frozen=True)
class Static:
    """Groups of ``degree`` workers, for the whole rollout."""

    degree: int


@dataclass(frozen=True)
class Threshold:
    """Merge neighbouring groups once at most ``sequences`` are left in them together and none of them waits."""

    sequences: int


Policy = Auto | Static | Threshold


class Action(StrEnum):
    HOLD = "hold"
    WIDEN = "widen"
    NARROW = "narrow"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now with the groups ``before``: go over to ``after``, or nothing.

    ``parts[i]``: indices of the sequences that go to ``after[i]``. ``finish_now_s`` are the predicted seconds to the
    end of these groups' sequences if they are never switched, ``finish_then_s`` with this decision and the best that
    may follow: the gain is their difference before, the cost is what the switch takes of it. All None where nothing
    had to be predicted. ``wait_s``: a switch is expected to be best in so many seconds.
    """

    action: Action
    before: tuple[Group, ...]
    after: tuple[Group, ...]
    reason: str
    parts: tuple[tuple[int, ...], ...] = ()
    finish_now_s: float | None = None
    finish_then_s: float | None = None
    predicted_gain_s: float | None = None
    predicted_cost_s: float | None = None
    wait_s: float | None = None


def decide(rollout: Rollout, table: CostTable, policy: Policy) -> list[Decision]:
    """One decision for each block in which there is something to decide: blocks without a sequence, or of one worker,
    are left out, as is everything under :class:`Static`, and what :class:`Threshold` leaves as it is.

    Raises ``ValueError`` if the groups are no nodes of the tree.
    """
    if isinstance(policy, Static) or len(rollout.of) == 0:
        return []
    tree = tree_of(rollout.groups, table)
    costs = Costs(table, len(rollout.of), rollout.slots)
    block = Block.whole(rollout, costs, outcomes(rollout.remaining.shape))
    decisions: list[Decision] = []
    for node in tree.blocks:
        if len(node) > 1 and any(
            load.sequences for load, g in zip(block.loads, block.groups, strict=True) if g[0] in node
        ):
            if isinstance(policy, Threshold):
                decisions += _merge_few(block, node, tree, costs, policy.sequences)
            else:
                decisions += _choose(block, node, tree, costs)
    return decisions


def predicted_end_s(rollout: Rollout, table: CostTable) -> float:
    """Mean seconds until the last sequence has ended, if no group is switched."""
    if len(rollout.of) == 0:
        return 0.0
    costs = Costs(table, len(rollout.of), rollout.slots)
    return float(Block.whole(rollout, costs, outcomes(rollout.remaining.shape)).stay_s(costs).mean())


def tree_of(groups: tuple[Group, ...], table: CostTable) -> Tree:
    """The tree over the workers of ``groups``. Raises ``ValueError`` if they are no nodes of it."""
    tree = Tree.over((worker for group in groups for worker in group), table.degrees)
    if not tree.has(groups):
        raise ValueError(f"the groups {groups} are no layout that can be switched: {tree.layout(1)} and wider can")
    return tree


def outcomes(shape: tuple[int, ...]) -> int:
    """How many of K outcomes of n sequences (``shape`` is [K, n]) are worth their time."""
    return min(shape[0], max(LEAST_OUTCOMES, MOST_WORK // max(shape[1], 1)))


def _choose(block: Block, node: Group, tree: Tree, costs: Costs) -> list[Decision]:
    inside = tuple(group for group in block.groups if group[0] in node)
    if not worth_a_look(block, node, tree, costs):
        return [
            Decision(action=Action.HOLD, before=inside, after=inside, reason="no other layout has faster steps now")
        ]
    plan = best_plan(block, node, tree, costs)
    return [_switch(move) for move in plan.moves] or [_hold(plan, inside, len(block.within(node)))]


def _switch(move: Move) -> Decision:
    widens = len(move.after) < len(move.before)
    gain_s = move.stay_s - move.end_s + move.cost_s
    n, degrees = sum(map(len, move.parts)), " and ".join(f"TP{d}" for d in sorted({len(g) for g in move.after}))
    return Decision(
        action=Action.WIDEN if widens else Action.NARROW,
        before=move.before,
        after=move.after,
        reason=(
            f"{_sequences(n)} left: in {degrees} they should end in {_time(move.end_s)} instead of "
            f"{_time(move.stay_s)}, {_time(move.cost_s)} for the switch included"
        ),
        parts=tuple(tuple(sorted(part.tolist())) for part in move.parts),
        finish_now_s=move.stay_s,
        finish_then_s=move.end_s,
        predicted_gain_s=gain_s,
        predicted_cost_s=move.cost_s,
    )


def _hold(plan: Plan, groups: tuple[Group, ...], n: int) -> Decision:
    stay_s = float(plan.stay_s.mean())
    if plan.wait_s is None:
        reason = f"{_sequences(n)} left: no switch is worth its cost"
    else:
        reason = f"{_sequences(n)} left: to become one group is better in {_time(plan.wait_s)} than now"
    return Decision(
        action=Action.HOLD,
        before=groups,
        after=groups,
        reason=reason,
        finish_now_s=stay_s,
        finish_then_s=plan.mean_s,
        predicted_gain_s=max(0.0, stay_s - plan.mean_s),
        predicted_cost_s=0.0,
        wait_s=plan.wait_s,
    )


def _merge_few(block: Block, node: Group, tree: Tree, costs: Costs, most: int) -> list[Decision]:
    """DynRL's rule: the widest groups that have few enough sequences, none of which waits."""
    if node in block.groups:
        return []
    part = block.within(node)
    if tree.may_be(node) and 0 < len(part) <= most and part.lanes.all():
        times = part.times(costs, (node,), np.zeros(len(part), np.int64), NOW)
        stay_s, end_s, cost_s = (float(a.mean()) for a in (times.stay_s, times.end_s[0], times.switch_s[0]))
        return [_switch(Move(part.groups, (node,), (part.who,), stay_s, end_s, cost_s))]
    return [decision for half in halves(node) for decision in _merge_few(block, half, tree, costs, most)]


def _sequences(n: int) -> str:
    return "1 sequence" if n == 1 else f"{n} sequences"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
