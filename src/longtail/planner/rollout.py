"""A rollout as the planner sees it, frozen; and parts of it as ``rollout_time.py`` simulates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.rollout_time import Groups, Outcome, Prices, Sequences, Switch, switch_times
from longtail.planner.tree import Group, head_ranges

NEVER = np.zeros(0)
NOW = np.zeros(1)
NOBODY_LEFT = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What is left of a rollout: its ``groups``, and n sequences in the order in which they came.

    ``of`` [n]: the group in which each sequence runs or waits. ``context`` [n]: its tokens so far, prompt included,
    which a decode step reads. ``lanes`` [n]: those that a switch would have to move for it, 0 while it waits; a prompt
    whose lanes are shared counts for one sample only. ``compute`` [n]: tokens to be computed when its turn comes (0
    while it runs, and for a sample whose prompt is there or computed with another one). ``remaining`` [K, n]: K
    equally likely outcomes of the tokens to come, at least 1 each. All int64. ``slots``: how many sequences a group of
    each degree runs at once.
    """

    groups: tuple[Group, ...]
    of: np.ndarray
    context: np.ndarray
    lanes: np.ndarray
    compute: np.ndarray
    remaining: np.ndarray
    slots: Mapping[int, int]

    def __post_init__(self) -> None:
        n = len(self.of)
        if any(len(a) != n for a in (self.context, self.lanes, self.compute)) or self.remaining.shape[1:] != (n,):
            raise ValueError("of, context, lanes, compute and the rows of remaining must have one entry per sequence")
        if n and (self.remaining.min(initial=1) < 1 or self.of.min() < 0 or self.of.max() >= len(self.groups)):
            raise ValueError("each sequence must have a token to come, and be in one of the groups")
        if min(self.slots.values(), default=0) < 1:
            raise ValueError("a group of each degree must have a slot")


class Costs:
    """A cost table as arrays for up to ``most`` sequences, and for groups with so many ``slots`` by degree."""

    def __init__(self, table: CostTable, most: int, slots: Mapping[int, int]) -> None:
        self.table, self.slots = table, slots
        self.row = {degree: row for row, degree in enumerate(table.degrees)}
        steps = [table.arrays(degree, most) for degree in table.degrees]
        self.step_s = np.stack([step.base_s for step in steps])
        self.context_s = np.stack([step.context_s for step in steps])
        self.recompute_s = np.array([table.prefill[degree].token_s for degree in table.degrees])
        self._shapes: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def shape(self, groups: tuple[Group, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each group: the row of its degree, its slots, and a time of 0 s."""
        degrees = tuple(map(len, groups))
        if degrees not in self._shapes:
            rows, slots = [self.row[degree] for degree in degrees], [self.slots[degree] for degree in degrees]
            self._shapes[degrees] = np.array(rows), np.array(slots), np.zeros(len(degrees))
        return self._shapes[degrees]

    def step(self, degree: int, batch: int, context_tokens: float) -> float:
        """Seconds of a decode step; 0 without a sequence."""
        row = self.row[degree]
        return float(self.step_s[row, batch] + self.context_s[row, batch] * context_tokens)

    def admit_s(self, compute: np.ndarray) -> np.ndarray:
        """Seconds [D, n] for computing so many tokens [n], at each degree."""
        if not compute.any():
            return np.zeros((len(self.row), len(compute)))
        return np.stack([self.table.prefill_s(degree, compute) for degree in self.table.degrees])

    def switch(self, before: tuple[Group, ...], behind: tuple[Group, ...]) -> Switch:
        costs, table = self.table.switch, self.table
        traffic_s = _traffic(before, behind, table.kv_heads) * (table.kv_bytes * costs.move_byte_s)
        return Switch(costs.handshake_s, costs.move_s, traffic_s)


@lru_cache(4096)
def _traffic(before: tuple[Group, ...], behind: tuple[Group, ...], heads: int) -> np.ndarray:
    """[G, H, W, 2]: KV heads that worker w sends (0) and takes in (1) when a sequence goes from group g to group h."""
    workers = {worker: w for w, worker in enumerate(sorted({w for group in before + behind for w in group}))}
    heads_moved = np.zeros((len(before), len(behind), len(workers), 2))
    for g, source in enumerate(before):
        for h, target in enumerate(behind):
            for giver, taker in zip(_holders(source, heads), _holders(target, heads), strict=True):
                if giver != taker:
                    heads_moved[g, h, workers[giver], 0] += 1
                    heads_moved[g, h, workers[taker], 1] += 1
    return heads_moved


def _holders(group: Group, heads: int) -> list[int]:
    """The worker that holds each KV head."""
    return [worker for worker, held in zip(group, head_ranges(heads, len(group)), strict=True) for _ in held]


class Load(NamedTuple):
    """Sequences of a group, those that wait included, and the tokens of their context together."""

    sequences: int
    tokens: float

    def step_s(self, costs: Costs, degree: int) -> float:
        """Seconds of a decode step of as many as can run; 0 without a sequence."""
        running = min(self.sequences, costs.slots[degree])
        return costs.step(degree, running, self.tokens * running / self.sequences) if running else 0.0

    def rate(self, costs: Costs, degree: int) -> float:
        """Tokens a second."""
        return min(self.sequences, costs.slots[degree]) / self.step_s(costs, degree) if self.sequences else 0.0


@dataclass(frozen=True)
class Block:
    """Neighbouring groups and their m sequences, by group, then in the order in which they came: ``who`` [m] they are.

    ``ready_s`` [G]: when each group can begin; ``admit_s`` [D, m]; the rest as in :class:`Rollout`.
    """

    groups: tuple[Group, ...]
    ready_s: np.ndarray
    of: np.ndarray
    who: np.ndarray
    context: np.ndarray
    lanes: np.ndarray
    admit_s: np.ndarray
    remaining: np.ndarray
    order: np.ndarray

    @classmethod
    def whole(cls, rollout: Rollout, costs: Costs, outcomes: int) -> Block:
        """All of a rollout, judged by the first ``outcomes`` of its outcomes."""
        at = np.argsort(rollout.of, kind="stable")
        remaining = np.ascontiguousarray(rollout.remaining[:outcomes, at])
        return cls(
            groups=rollout.groups,
            ready_s=np.zeros(len(rollout.groups)),
            of=rollout.of[at],
            who=at,
            context=rollout.context[at],
            lanes=rollout.lanes[at],
            admit_s=costs.admit_s(rollout.compute[at]),
            remaining=remaining,
            order=np.argsort(remaining, axis=1),
        )

    def __len__(self) -> int:
        return len(self.of)

    @cached_property
    def begun(self) -> bool:
        """Whether any sequence has lanes."""
        return bool(self.lanes.any())

    @cached_property
    def _arrived(self) -> np.ndarray:
        return np.argsort(self.who)

    @cached_property
    def loads(self) -> list[Load]:
        """Of each group."""
        n = len(self.groups)
        counts, tokens = np.bincount(self.of, minlength=n), np.bincount(self.of, self.context, minlength=n)
        return [Load(*load) for load in zip(counts.tolist(), tokens.tolist(), strict=True)]

    def step_s(self, costs: Costs) -> float:
        """The longest of the groups' next decode steps."""
        return max(load.step_s(costs, len(g)) for load, g in zip(self.loads, self.groups, strict=True))

    def within(self, node: Group) -> Block:
        """The groups that lie in ``node``."""
        inside = [g for g, group in enumerate(self.groups) if node[0] <= group[0] <= node[-1]]
        first, last = inside[0], inside[-1] + 1
        if last - first == len(self.groups):
            return self
        a, b = np.searchsorted(self.of, (first, last))
        remaining = np.ascontiguousarray(self.remaining[:, a:b])
        return Block(
            groups=self.groups[first:last],
            ready_s=self.ready_s[first:last],
            of=self.of[a:b] - first,
            who=self.who[a:b],
            context=self.context[a:b],
            lanes=self.lanes[a:b],
            admit_s=np.ascontiguousarray(self.admit_s[:, a:b]),
            remaining=remaining,
            order=np.argsort(remaining, axis=1),
        )

    def joined(self, node: Group, ready_s: float) -> Block:
        """The same sequences in one group, which can begin at ``ready_s``."""
        return replace(self, groups=(node,), ready_s=np.array([ready_s]), of=np.zeros(len(self), np.int64))

    def regrouped(self, groups: tuple[Group, ...], of: np.ndarray, ready_s: np.ndarray) -> Block:
        """The same sequences in other groups: each ``of`` [m]."""
        at = np.argsort(of, kind="stable")
        remaining = np.ascontiguousarray(self.remaining[:, at])
        return Block(
            groups=groups,
            ready_s=ready_s,
            of=of[at],
            who=self.who[at],
            context=self.context[at],
            lanes=self.lanes[at],
            admit_s=np.ascontiguousarray(self.admit_s[:, at]),
            remaining=remaining,
            order=np.argsort(remaining, axis=1),
        )

    def times(
        self,
        costs: Costs,
        behind: tuple[Group, ...],
        of: np.ndarray,
        after_s: np.ndarray = NEVER,
        left: np.ndarray = NOBODY_LEFT,
    ) -> Outcome:
        """What comes of going over to the groups ``behind``, in which each sequence is ``of`` [m], at each trigger."""
        return switch_times(
            self.remaining,
            self.order,
            Sequences(self.context, self.lanes, self._arrived),
            Prices(costs.step_s, costs.context_s, self.admit_s, costs.recompute_s),
            Groups(self.of, *costs.shape(self.groups)[:2], self.ready_s),
            Groups(of, *costs.shape(behind)),
            costs.switch(self.groups, behind),
            after_s,
            left,
        )

    def stay_s(self, costs: Costs) -> np.ndarray:
        """Seconds [K] until the last sequence ends, if the groups stay as they are."""
        return self.times(costs, self.groups, self.of).stay_s
