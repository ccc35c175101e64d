"""Cost tables, rollouts, and a simulation of them that takes one step after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, SwitchCosts, TableKey
from longtail.planner.rollout import Block, Costs, Rollout
from longtail.planner.tree import Group

KEY = TableKey(machine="m", model="toy", dtype="float32", communicator="shm", threads=1)
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 64), (100, 1000)
SLACK = 1.0 - 1e-9


def table(
    steps: dict[int, tuple[float, float, float]],
    *,
    prefill_s: float = 1e-4,
    handshake_s: float = 0.0,
    move_s: float = 0.0,
    move_byte_s: float = 0.0,
    kv_heads: int = 8,
) -> CostTable:
    """``steps``: of each degree the seconds of a step that come once, for each sequence, for each token of context."""
    return CostTable(
        key=KEY,
        measured="2026-01-01T00:00:00",
        detail="full",
        kv_heads=kv_heads,
        kv_bytes=100,
        decode={
            degree: DecodeGrid(
                batches=BATCHES,
                contexts=CONTEXTS,
                seconds=tuple(tuple(base + each * n + token * n * c for c in CONTEXTS) for n in BATCHES),
            )
            for degree, (base, each, token) in steps.items()
        },
        prefill={
            degree: PrefillCosts(chunk_tokens=(16, 64), seconds_per_token=(prefill_s, prefill_s)) for degree in steps
        },
        switch=SwitchCosts(handshake_s=handshake_s, move_s=move_s, move_byte_s=move_byte_s),
    )


def rollout(
    groups: Sequence[Group],
    remaining: Sequence[int] | np.ndarray,
    *,
    of: Sequence[int] | None = None,
    context: Sequence[int] | int = 100,
    waiting: int = 0,
    slots: int = 64,
) -> Rollout:
    """``remaining`` [n], or [K, n]; the last ``waiting`` sequences wait; ``slots`` for each worker of a group."""
    outcomes = np.atleast_2d(np.asarray(remaining, np.int64))
    n = outcomes.shape[1]
    contexts = np.broadcast_to(np.asarray(context, np.int64), n).copy()
    waits = np.arange(n) >= n - waiting
    return Rollout(
        groups=tuple(groups),
        of=np.arange(n) % len(groups) if of is None else np.asarray(of, np.int64),
        context=contexts,
        lanes=np.where(waits, 0, contexts),
        compute=np.where(waits, contexts, 0),
        remaining=outcomes,
        slots={degree: slots * degree for degree in range(1, 9)},
    )


class Stepwise:
    """One outcome of a block, one decode step after the other; the same rules as ``planner/rollout_time.py``.

    Sequences are [place, tokens to come, context, whether it has its lanes, tokens that a switch moves]; ``held`` ones
    among those that wait need not be computed.
    """

    def __init__(self, groups: Sequence[Group], costs: CostTable, slots: dict[int, int], clock: float = 0.0) -> None:
        self.groups, self.costs, self.slots = groups, costs, slots
        self.clock = [clock] * len(groups)
        self.running: list[list[list[int]]] = [[] for _ in groups]
        self.waiting: list[list[list[int]]] = [[] for _ in groups]
        self.last = self.stopped = clock

    @classmethod
    def of(cls, state: Rollout, costs: CostTable, outcome: int = 0) -> Stepwise:
        self = cls(state.groups, costs, dict(state.slots))
        for i, g in enumerate(state.of.tolist()):
            left, context, lanes = (int(a[i]) for a in (state.remaining[outcome], state.context, state.lanes))
            (self.running if lanes else self.waiting)[g].append([i, left, context, int(lanes > 0), lanes])
        self.compute = state.compute
        return self

    @property
    def alive(self) -> int:
        return sum(len(part) for part in self.running + self.waiting)

    def step_s(self, g: int) -> float:
        batch = self.running[g]
        return self.costs.decode_s(len(self.groups[g]), len(batch), sum(sequence[2] for sequence in batch))

    def step(self, g: int) -> bool:
        """A decode step of group ``g``; whether any sequence ended."""
        self.clock[g] += self.step_s(g)
        for sequence in self.running[g]:
            sequence[1] -= 1
            sequence[2] += 1
            sequence[4] += 1
        ended = any(sequence[1] == 0 for sequence in self.running[g])
        self.running[g] = [sequence for sequence in self.running[g] if sequence[1]]
        if ended:
            self.last = max(self.last, self.clock[g])
        return ended

    def admit(self, g: int, *, steals: bool) -> None:
        degree = len(self.groups[g])
        while len(self.running[g]) < self.slots[degree]:
            queue = self.waiting[g]
            if not queue and steals:
                queue = max(self.waiting, key=len)
            if not queue:
                return
            sequence = queue.pop(0)
            if not sequence[3]:
                compute = self.compute[sequence[0] : sequence[0] + 1]
                self.clock[g] += float(self.costs.prefill_s(degree, compute)[0])
                sequence[1:] = [sequence[1] - 1, sequence[2] + 1, 1, sequence[2] + 1]
            if sequence[1]:
                self.running[g].append(sequence)
            else:
                self.last = max(self.last, self.clock[g])

    def run(self, *, after_s: float | None = None, left: int | None = None) -> bool:
        """To the end, or to the trigger; returns whether there was one. All groups then are at a step boundary."""
        if after_s is not None and after_s <= 0:
            return True
        everyone = range(len(self.groups))
        for steals in (False, True):
            for g in everyone:
                self.admit(g, steals=steals)
        while self.alive:
            ends = {g: self._next_end(g) for g in everyone if self.running[g]}
            g = min(ends, key=lambda g: (ends[g], g))
            if after_s is not None and after_s <= ends[g]:
                self._stop(after_s)
                return True
            while not self.step(g):
                pass
            if left is not None and 0 < self.alive <= left:
                self._stop(self.clock[g])
                return True
            self.admit(g, steals=True)
        return False

    def _next_end(self, g: int) -> float:
        clock, last, running = self.clock[g], self.last, [list(sequence) for sequence in self.running[g]]
        while not self.step(g):
            pass
        end, self.clock[g], self.last, self.running[g] = self.clock[g], clock, last, running
        return end

    def _stop(self, at_s: float) -> None:
        for g in range(len(self.groups)):
            while self.running[g] and self.clock[g] < at_s * SLACK:
                if self.step(g):
                    break
        self.stopped = max(self.clock)

    def switched(self, behind: Sequence[Group], to: Sequence[int]) -> Stepwise:
        """Everything in the groups ``behind`` after a switch now."""
        tokens = np.zeros((len(self.groups), len(behind)))
        anew = np.zeros(len(behind))
        for g, part in enumerate(self.running):
            for i, _, context, _, lanes in part:
                tokens[g, to[i]] += lanes
                anew[to[i]] += context
        prices = Costs(self.costs, 1, self.slots).switch(tuple(self.groups), tuple(behind))
        moved = np.einsum("gh,ghwd->wd", tokens, prices.traffic_s).max()
        anew_s = max(
            recompute * self.costs.prefill[len(group)].token_s for recompute, group in zip(anew, behind, strict=True)
        )
        cost = prices.handshake_s + (min(prices.move_s + moved, anew_s) if moved else 0.0)
        then = Stepwise(behind, self.costs, self.slots, self.stopped + cost)
        then.compute = self.compute
        for sequence in sorted(sequence for part in self.running for sequence in part):
            h = to[sequence[0]]
            fits = len(then.running[h]) < self.slots[len(behind[h])]
            (then.running if fits else then.waiting)[h].append(list(sequence))
        for sequence in sorted(sequence for part in self.waiting for sequence in part):
            then.waiting[to[sequence[0]]].append(list(sequence))
        return then


def stepwise_end_s(
    state: Rollout,
    costs: CostTable,
    behind: Sequence[Group],
    to: Sequence[int],
    *,
    after_s: float | None = None,
    left: int | None = None,
    outcome: int = 0,
) -> float:
    """Seconds until all have ended, with a switch at the trigger; without one, if there is none."""
    first = Stepwise.of(state, costs, outcome)
    if not first.run(after_s=after_s, left=left) or not first.alive:
        return first.last
    then = first.switched(behind, to)
    then.run()
    return max(first.last, then.last)


def block_of(state: Rollout, costs: CostTable) -> tuple[Block, Costs]:
    prices = Costs(costs, len(state.of), state.slots)
    return Block.whole(state, prices, len(state.remaining)), prices
