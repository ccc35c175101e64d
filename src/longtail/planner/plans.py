"""What is the best thing to do with the groups of a block, now or later?

A plan is judged by its mean end over equally likely outcomes, the same for all plans. For each node of the tree are
compared: its halves go their own ways; all its groups become one now; they become one later, at the best of a few
moments (so many steps from now, or when so many sequences are left); its halves do what is best for them now, and
become one later. A plan for later is always open, so *now* is taken only if no more can be gained by waiting: the bare
rule "gain above cost" fires too early, as cost falls when sequences end, and few sequences gain more from a wide group
than many.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from longtail.planner.rollout import NEVER, Block, Costs, Load
from longtail.planner.tree import Group, Tree, halves

MARGIN = 0.02
"""The part of the predicted rest that a switch must save, net: tables are right to a few per cent, and what is wrong in
them is wrong alike before and after a switch, so the difference is better known than either."""
MARGIN_STEPS = 1.0
"""And so many decode steps of today: groups reach a step boundary at different times, so a switch costs about that
much beyond what can be measured of it."""
EQUAL = 1.0 + 1e-9
"""Times within rounding of each other are equal: then *now* is as good as later."""
FEW = 8
"""Up to so many sequences each number of them that may be left is a moment to switch; of more, each of
:data:`THINNING` times the last."""
THINNING = 0.6


@dataclass(frozen=True)
class Move:
    """A switch to make now: from groups to others; ``parts[i]`` are the sequences of ``after[i]``."""

    before: tuple[Group, ...]
    after: tuple[Group, ...]
    parts: tuple[np.ndarray, ...]
    stay_s: float
    end_s: float
    cost_s: float
    """Mean seconds: the end without any switch of these groups, the end with it, and what it takes."""


@dataclass(frozen=True)
class Plan:
    """``end_s`` [K] of a block if ``moves`` are made now and the best is done later; ``stay_s`` [K] without any switch.

    ``behind``: the block after the moves. ``later``: the groups that are expected to become one in ``wait_s`` seconds.
    """

    end_s: np.ndarray
    stay_s: np.ndarray
    behind: Block
    moves: tuple[Move, ...] = ()
    later: tuple[Group, ...] = ()
    wait_s: float | None = None

    @property
    def mean_s(self) -> float:
        return float(self.end_s.mean())


def best_plan(block: Block, node: Group, tree: Tree, costs: Costs, *, narrows: bool = True) -> Plan:
    """For the groups in ``node``. ``narrows``: wide groups may be taken apart."""
    block = block.within(node)
    if len(block.groups) == 1:
        return _narrowed(block, tree, costs) if narrows and len(node) > 1 else _stay(block, costs)
    apart = None
    if any(half not in block.groups or (narrows and len(half) > 1) for half in halves(node)):
        apart = _apart(block, node, tree, costs, narrows=narrows)
    if tree.may_be(node):
        return _joined(block, node, apart, costs)
    return apart or _stay(block, costs)


def may_gain(
    loads: list[Load], before: tuple[Group, ...], after: tuple[Group, ...], block: Block, costs: Costs
) -> bool:
    """Whether steps of the groups ``after`` would be shorter now than those of ``before``, with these ``loads``, or
    yield more tokens a second. If neither, then going over one step later is better, whatever it is good for then."""
    shares = _even(sum(load.sequences for load in loads), sum(load.tokens for load in loads), len(after))
    now = [(load.step_s(costs, len(g)), load.rate(costs, len(g))) for load, g in zip(loads, before, strict=True)]
    then = [(load.step_s(costs, len(g)), load.rate(costs, len(g))) for load, g in zip(shares, after, strict=True)]
    return max(s for s, _ in then) < max(s for s, _ in now) or sum(r for _, r in then) > sum(r for _, r in now)


def _even(sequences: int, tokens: float, parts: int) -> list[Load]:
    counts = [sequences // parts + (i < sequences % parts) for i in range(parts)]
    return [Load(n, tokens * n / sequences) for n in counts]


def worth_a_look(block: Block, node: Group, tree: Tree, costs: Costs) -> bool:
    """Whether any switch in ``node`` may gain something now."""
    inside = [g for g, group in enumerate(block.groups) if node[0] <= group[0] <= node[-1]]
    loads, groups = block.loads[inside[0] : inside[-1] + 1], block.groups[inside[0] : inside[-1] + 1]
    if not any(load.sequences for load in loads):
        return False
    if groups == (node,):
        parts = {tree.split(node, degree) for degree in tree.degrees if degree < len(node)}
        return any(may_gain(loads, groups, after, block, costs) for after in parts)
    if tree.may_be(node) and may_gain(loads, groups, (node,), block, costs):
        return True
    return any(worth_a_look(block, half, tree, costs) for half in halves(node))


def _stay(block: Block, costs: Costs) -> Plan:
    stay_s = block.stay_s(costs) if len(block) else np.zeros(len(block.remaining))
    return Plan(stay_s, stay_s, block)


def _apart(block: Block, node: Group, tree: Tree, costs: Costs, *, narrows: bool) -> Plan:
    """The halves go their own ways."""
    first, second = (best_plan(block, half, tree, costs, narrows=narrows) for half in halves(node))
    critical = first if first.mean_s >= second.mean_s else second
    a, b = first.behind, second.behind
    behind = block
    if first.moves or second.moves:
        of = np.empty(len(block), np.int64)
        place = {who: i for i, who in enumerate(block.who.tolist())}
        for part, offset in ((a, 0), (b, len(a.groups))):
            of[[place[who] for who in part.who.tolist()]] = part.of + offset
        behind = block.regrouped(a.groups + b.groups, of, np.concatenate([a.ready_s, b.ready_s]))
    return Plan(
        end_s=np.maximum(first.end_s, second.end_s),
        stay_s=np.maximum(first.stay_s, second.stay_s),
        behind=behind,
        moves=first.moves + second.moves,
        later=critical.later,
        wait_s=critical.wait_s,
    )


def _joined(block: Block, node: Group, apart: Plan | None, costs: Costs) -> Plan:
    """The best of becoming one group, now or later, of what the halves do on their own, and of staying as it is."""
    together = np.zeros(len(block), np.int64)
    times = block.times(costs, (node,), together, _moments_s(block, costs), _counts(len(block)))
    means = _means(times.end_s)
    (stay_s,) = _means(times.stay_s[None, :])
    best, best_s = Plan(times.stay_s, times.stay_s, block), stay_s
    if apart is not None and apart.mean_s <= best_s:
        best, best_s = replace(apart, stay_s=times.stay_s), apart.mean_s
    first = int(block.begun)
    if means[first:] and min(means[first:]) < best_s:
        row = means.index(min(means[first:]), first)
        wait_s = float(times.begin_s[row].mean())
        best, best_s = Plan(times.end_s[row], times.stay_s, block, later=block.groups, wait_s=wait_s), means[row]
    if apart is not None and apart.moves and apart.behind.groups != (node,):
        both = _joined_later(apart, node, costs)
        if both.mean_s < best_s:
            best, best_s = replace(both, stay_s=times.stay_s), both.mean_s
    if not block.begun or means[0] > best_s * EQUAL or not _worthwhile(block, stay_s, means[0], costs):
        return best
    cost_s = float(times.switch_s[0, 0])
    move = Move(block.groups, (node,), (block.who,), stay_s, means[0], cost_s)
    return Plan(times.end_s[0], times.stay_s, block.joined(node, float(times.begin_s[0, 0]) + cost_s), (move,))


def _joined_later(apart: Plan, node: Group, costs: Costs) -> Plan:
    """What the halves do now, and the best moment to become one group after that."""
    block = apart.behind
    together = np.zeros(len(block), np.int64)
    times = block.times(costs, (node,), together, _moments_s(block, costs)[1:], _counts(len(block)))
    means = _means(times.end_s)
    if not means:
        return apart
    row = means.index(min(means))
    wait_s = float(times.begin_s[row].mean())
    return replace(apart, end_s=times.end_s[row], later=block.groups, wait_s=wait_s)


def _means(times_s: np.ndarray) -> list[float]:
    """The mean of each row."""
    return (times_s.sum(axis=1) / times_s.shape[1]).tolist()


def _narrowed(block: Block, tree: Tree, costs: Costs) -> Plan:
    """The best of leaving a wide group as it is, and of taking it apart now."""
    (node,) = block.groups
    stay = best = _stay(block, costs)
    for groups in {tree.split(node, degree): None for degree in sorted(tree.degrees) if degree < len(node)}:
        if not block.begun or not may_gain(block.loads, block.groups, groups, block, costs):
            continue
        of = deal(block, groups, costs)
        times = block.times(costs, groups, of, _moments_s(block, costs), _counts(len(block)))
        now_s, *later_s = _means(times.end_s)
        if later_s and min(later_s) < now_s:
            continue
        cost_s = float(times.switch_s[0, 0])
        behind = block.regrouped(groups, of, np.full(len(groups), float(times.begin_s[0, 0]) + cost_s))
        plan = best_plan(behind, node, tree, costs, narrows=False)
        if plan.mean_s < best.mean_s and _worthwhile(block, stay.mean_s, plan.mean_s, costs):
            parts = tuple(behind.who[behind.of == g] for g in range(len(groups)))
            move = Move((node,), groups, parts, stay.mean_s, plan.mean_s, cost_s)
            best = replace(plan, stay_s=stay.stay_s, moves=(move,), behind=behind)
    return best


def deal(block: Block, groups: tuple[Group, ...], costs: Costs) -> np.ndarray:
    """The group [m] of each sequence: longest expected first, each to the group that would end its tokens first."""
    expected = block.remaining.mean(axis=0)
    even = _even(len(block), float(block.context.sum()), len(groups))
    steps = [load.step_s(costs, len(group)) for load, group in zip(even, groups, strict=True)]
    load = [0.0] * len(groups)
    of = np.empty(len(block), np.int64)
    for i in np.argsort(-expected, kind="stable").tolist():
        g = min(range(len(groups)), key=lambda g: (load[g] + expected[i]) * steps[g])
        load[g] += expected[i]
        of[i] = g
    return of


def _worthwhile(block: Block, stay_s: float, end_s: float, costs: Costs) -> bool:
    return stay_s - end_s > max(MARGIN * stay_s, MARGIN_STEPS * block.step_s(costs))


def _moments_s(block: Block, costs: Costs) -> np.ndarray:
    """Now, after one more step, 2, 4, 8 and then ever four times as many, in seconds; none if nobody has begun: that is
    the start of a rollout, where another layout is another start."""
    if not block.begun:
        return NEVER
    return _steps(int(block.remaining.max()).bit_length()) * block.step_s(costs)


@cache
def _steps(bits: int) -> np.ndarray:
    return np.array([0.0, 1.0, 2.0, 4.0, *(2.0**power for power in range(3, bits, 2))])


@cache
def _counts(n: int) -> np.ndarray:
    """Numbers of sequences left, descending, at which to switch."""
    counts = list(range(n - 1, 0, -1)) if n <= FEW else [n - 1]
    while counts and counts[-1] > 1:
        counts.append(int(counts[-1] * THINNING))
    return np.array(counts, np.int64)
