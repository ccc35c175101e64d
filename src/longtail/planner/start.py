"""In which layout should a rollout begin?

No lanes are to be moved yet, so each layout costs a handshake at most, and is worth what its best continuation is
worth: to begin narrow and become wide in the tail is the plan that a narrow start is judged by. That plan is judged too
well: in each outcome it switches at the best moment, which nobody knows when it comes. So of layouts that are equal
within a margin the widest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from longtail.core.types import Layout
from longtail.costs.table import CostTable
from longtail.planner.order import Work
from longtail.planner.plans import best_plan
from longtail.planner.rollout import Block, Costs, Rollout
from longtail.planner.tree import Group, Tree
from longtail.planner.widen import Auto, Policy, Static, outcomes

EQUAL = 0.03
"""Layouts whose predicted times differ by less are equally good."""


@dataclass(frozen=True)
class Start:
    """``layout``, and the predicted seconds of the whole rollout for each degree to begin with (none where nothing had
    to be predicted)."""

    layout: Layout
    predicted_s: Mapping[int, float]

    @property
    def degree(self) -> int:
        return self.layout.degree


def start_layout(work: Work, workers: int, slots: Mapping[int, int], table: CostTable, policy: Policy) -> Start:
    """The layout in which to begin ``work`` on ``workers`` workers; ``slots`` as in
    :class:`~longtail.planner.rollout.Rollout`.

    Requests are taken to be dealt out by expected tokens; how they are really placed is ``planner/order.py``'s matter,
    with the costs of this layout (:meth:`CostTable.affine`). Of equally good layouts the widest is taken.
    """
    if isinstance(policy, Static):
        return Start(Layout.uniform(workers, policy.degree), {})
    tree = Tree.over(range(workers), table.degrees)
    if not isinstance(policy, Auto) or len(work) == 0 or len(tree.degrees) == 1:
        return Start(Layout.narrow(workers), {})
    costs = Costs(table, work.lengths.shape[1], slots)
    block_of = _deal(work.expected, np.array([len(block) for block in tree.blocks], float))
    predicted_s: dict[int, float] = {}
    layouts = {degree: tree.layout(degree) for degree in sorted(tree.degrees)}
    for degree, layout in layouts.items():
        if layout in (layouts[d] for d in predicted_s):
            continue
        rollout = _rollout(work, layout, tree, block_of, slots, costs)
        whole = Block.whole(rollout, costs, outcomes(rollout.remaining.shape))
        ends = [best_plan(whole, node, tree, costs, narrows=False).end_s for node in tree.blocks]
        handshake_s = table.switch.handshake_s if layout.degree > 1 else 0.0
        predicted_s[degree] = float(np.maximum.reduce(ends).mean()) + handshake_s
    best = max(degree for degree, seconds in predicted_s.items() if seconds <= (1 + EQUAL) * min(predicted_s.values()))
    return Start(layouts[best], predicted_s)


def _rollout(
    work: Work, layout: Layout, tree: Tree, block_of: np.ndarray, slots: Mapping[int, int], costs: Costs
) -> Rollout:
    """All of ``work`` waits in the groups of ``layout``, each request in its block."""
    group_of = np.empty(len(work), np.int64)
    for b, block in enumerate(tree.blocks):
        inside = [g for g, group in enumerate(layout.groups) if group[0] in block]
        own = np.flatnonzero(block_of == b)
        speeds = np.array([_tokens_per_s(layout.groups[g], slots, costs) for g in inside])
        group_of[own] = np.array(inside)[_deal(work.expected[own], speeds)]
    prompt = np.repeat(work.prompt_tokens, work.samples)
    compute = np.zeros(len(prompt), np.int64)
    compute[work.first[:-1]] = work.prompt_tokens  # once for all samples
    return Rollout(
        groups=layout.groups,
        of=np.repeat(group_of, work.samples),
        context=prompt,
        lanes=np.zeros(len(prompt), np.int64),
        compute=compute,
        remaining=work.lengths,
        slots=slots,
    )


def _tokens_per_s(group: Group, slots: Mapping[int, int], costs: Costs) -> float:
    degree = len(group)
    batch = min(slots[degree], costs.step_s.shape[1] - 1)
    return batch / max(costs.step(degree, batch, 0.0), 1e-9)  # a noisy measurement may leave nothing without context


def _deal(tokens: np.ndarray, speeds: np.ndarray) -> np.ndarray:
    """Most tokens first, each to whoever would end them first."""
    load = np.zeros(len(speeds))
    to = np.empty(len(tokens), np.int64)
    for i in np.argsort(-tokens, kind="stable").tolist():
        to[i] = ((load + tokens[i]) / speeds).argmin()
        load[to[i]] += tokens[i]
    return to
