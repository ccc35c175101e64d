"""Merge: the tail of a rollout on few workers, and spread: on more of them again. What it takes, and what it saves.

A decode step of few sequences costs little less than one of many, so a tail that is decoded on one worker takes far
fewer worker-seconds than the same tail on all of them. What others do with the workers that get free pays for it; the
pipeline itself ends its rollout a little later. Moving sequences has its price: the workers concerned wait for each
other, and each sequence that moves has its lanes sent or computed again, whichever is cheaper. So long prefixes are
not moved for a short rest: to re-home contexts of tens of thousands of tokens eagerly makes steps slower, not faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numba
import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.cells import Cells
from longtail.planner.graph import Part
from longtail.planner.plans import MARGIN
from longtail.planner.solo import FEW, RUNS, Sequences, Solo, Steps, longest_first, run, solo
from longtail.planner.state import PipelineState

LATENCY = 1.5
"""A merge that is planned ahead makes a rollout so many times longer at most, in solo seconds."""
MOST_MOMENTS = 6


class What(StrEnum):
    STAY = "stay"
    LATER = "later"
    """Stay now, and merge when fewer are left."""
    MERGE = "merge"
    SPREAD = "spread"


class Carry(NamedTuple):
    """Seconds of a relocation: ``fixed_s`` once, ``lane_s`` for each token in lanes that a worker gives or takes, or
    ``token_s`` for each token that it computes again."""

    fixed_s: float
    move_s: float
    lane_s: float
    token_s: float

    @classmethod
    def of(cls, table: CostTable) -> Carry:
        switch = table.switch
        lane_s = table.kv_bytes * table.kv_heads * switch.move_byte_s
        return cls(switch.handshake_s, switch.move_s, lane_s, table.prefill[1].token_s)


@dataclass(frozen=True)
class Present:
    """The samples of a rollout that have not ended, n of them, with the ``worker`` [n] (of ``workers`` in all) that
    each is on; the rest as in :class:`Sequences` and :class:`~longtail.planner.state.Live`."""

    worker: np.ndarray
    left: np.ndarray
    context: np.ndarray
    admit_s: np.ndarray
    lanes: np.ndarray
    workers: int

    @classmethod
    def of(cls, state: PipelineState, workers: int) -> Present:
        """As if no group were wider than one worker, each group's sequences dealt out to its members; what has not been
        handed out goes to whoever has fewest tokens."""
        live = state.live
        worker, prompts = live.worker.copy(), max(int(state.step.prompts.sum()), 1)
        if state.degree > 1:
            for leader in np.unique(worker[worker >= 0]).tolist():
                own = np.flatnonzero(live.worker == leader)
                worker[own] = leader + np.arange(len(own)) % min(state.degree, workers - leader)
        if (pending := np.flatnonzero(worker < 0)).size:
            on = np.array(state.workers or range(workers))
            tokens = np.bincount(worker[worker >= 0], live.remaining[worker >= 0], workers)[on]
            worker[pending] = on[longest_first(live.remaining[pending], len(on), tokens)]
        share = state.step.prefill_tokens / prompts
        admit_s = np.where(live.lanes > 0, RUNS, live.context * (share * state.costs.prefill[1].token_s))
        return cls(worker, live.remaining, live.context, admit_s, live.lanes, workers)

    def __len__(self) -> int:
        return len(self.worker)

    def on(self, worker: np.ndarray) -> Sequences:
        return Sequences(self.left, self.context, self.admit_s, np.zeros(1, np.int64)).dealt(worker, self.workers)

    def merged(self, to: tuple[int, ...]) -> np.ndarray:
        """The worker [n] of each if all go to ``to``: who is there stays, the others go to who has fewest tokens."""
        targets = np.array(to)
        outside = np.flatnonzero(~np.isin(self.worker, targets))
        tokens = np.bincount(self.worker, self.left, self.workers)[targets]
        worker = self.worker.copy()
        worker[outside] = targets[longest_first(self.left[outside], len(targets), tokens)]
        return worker

    def spread(self, to: tuple[int, ...]) -> np.ndarray:
        """The same if they are dealt out evenly over ``to``."""
        return np.array(to)[longest_first(self.left, len(to))]

    def carry_s(self, worker: np.ndarray, carry: Carry) -> float:
        """Seconds for moving everyone to ``worker`` [n], the busiest worker's; without waiting for steps under way."""
        moves = (worker != self.worker) & (self.lanes > 0)
        if not moves.any():
            return carry.fixed_s
        lanes_s, anew_s = self.lanes[moves] * carry.lane_s, self.context[moves] * carry.token_s
        sent = lanes_s < anew_s
        taken = np.bincount(worker[moves], np.where(sent, lanes_s, anew_s), self.workers)
        given = np.bincount(self.worker[moves], np.where(sent, lanes_s, 0.0), self.workers)
        return carry.fixed_s + carry.move_s * bool(sent.any()) + float(max(taken.max(), given.max()))


@dataclass(frozen=True)
class Alternative:
    """Something to do with a rollout now. ``parts`` are over all cells, ``work_s`` the worker-seconds to its end and
    ``end_s`` the longest of its workers' solo seconds, ``cost_s`` for moving included in both."""

    what: What
    to: tuple[int, ...]
    parts: tuple[Part, ...]
    work_s: float
    end_s: float
    cost_s: float = 0.0
    cost_work_s: float = 0.0


def alternatives(
    state: PipelineState,
    present: Present,
    steps: Steps,
    cells: Cells,
    *,
    crowd: np.ndarray,
    wait_s: float,
    merges: bool,
    offset: int,
) -> list[Alternative]:
    """To stay (always the first), to merge later, to merge now to a half, a quarter and so on of the workers (of many
    workers, to fewer of these), to spread over all: each only if it may be of use, and merges only if they save more
    worker-seconds than they take.

    ``crowd`` [W]: how much of each worker's time others want, 0 to 1 and more. ``wait_s``: for quanta of others that
    are under way.
    """
    sequences = present.on(present.worker)
    whole = solo(sequences, steps, state.slots)
    stay = _alternative(What.STAY, (), whole, cells)
    found = [stay]
    if not len(present):
        return found
    carry = Carry.of(state.costs)
    holders = np.flatnonzero(np.bincount(present.worker, minlength=present.workers))
    step_s = float(steps.base_s[0, min(len(present), steps.base_s.shape[1] - 1)])
    wait_s += step_s
    if merges and state.merges_left > 0 and len(holders) > 1:
        if later := rollout(sequences, steps, state.slots, stands_for=1.0, carry=carry)[1]:
            parts = tuple(_in_cells(part, cells, offset * i) for i, part in enumerate(later))
            work_s, end_s = sum(p.work_s(cells.sizes) for p in parts), sum(p.critical_s for p in parts)
            found.append(Alternative(What.LATER, (), parts, work_s, end_s))
        held_s = np.bincount(present.worker, present.lanes, present.workers) * min(carry.lane_s, carry.token_s)
        inviting = holders[np.argsort(crowd[holders] * stay.end_s - held_s[holders], kind="stable")].tolist()
        count, part = len(holders), 2 if len(holders) <= 16 else 4
        while count > 1:
            count = -(-count // part)
            to = tuple(sorted(inviting[:count]))
            found.append(_moved(What.MERGE, to, present.merged(to), state, present, steps, cells, carry, wait_s))
        found = [a for a in found if a.what != What.MERGE or a.work_s < (1.0 - MARGIN) * stay.work_s]
    if len(holders) < present.workers and len(present) > len(holders) and (present.lanes > 0).all():
        to = tuple(range(present.workers))
        spread = _moved(What.SPREAD, to, present.spread(to), state, present, steps, cells, carry, wait_s)
        if spread.end_s < (1.0 - MARGIN) * stay.end_s - step_s:
            found.append(spread)
    return found


def _moved(
    what: What,
    to: tuple[int, ...],
    worker: np.ndarray,
    state: PipelineState,
    present: Present,
    steps: Steps,
    cells: Cells,
    carry: Carry,
    wait_s: float,
) -> Alternative:
    cost_s = present.carry_s(worker, carry) + wait_s
    after = solo(present.on(worker), steps, state.slots)
    concerned = np.union1d(present.worker, np.array(to))
    after.seconds[concerned] += cost_s
    return _alternative(what, to, after, cells, cost_s, cost_s * len(concerned))


def _alternative(
    what: What, to: tuple[int, ...], whole: Solo, cells: Cells, cost_s: float = 0.0, cost_work_s: float = 0.0
) -> Alternative:
    part = _in_cells(Part.of(whole), cells)
    return Alternative(
        what, to, (part,), float(whole.seconds.sum()), float(whole.seconds.max(initial=0.0)), cost_s, cost_work_s
    )


def _in_cells(part: Part, cells: Cells, offset: int = 0) -> Part:
    """``part`` has an entry for each worker; a cell takes as long as its last one, and is busy as they are on average.

    ``offset``: the first worker's entry is that of another one.
    """
    if offset:
        part = part.turned(offset)
    if cells.count == cells.workers:
        return part
    first = cells.bounds[:-1]
    longest = np.maximum.reduceat(part.solo_s, first)
    mean = np.add.reduceat(part.solo_s * part.busy, first) / cells.sizes
    small, prefill = (np.add.reduceat(a, first) / cells.sizes for a in (part.small_s, part.prefill_s))
    busy = mean / np.maximum(longest, 1e-12)
    return Part(longest, np.where(longest > 0, busy, 1.0), small / np.maximum(busy, 1e-12), prefill)


def rollout(
    sequences: Sequences, steps: Steps, slots: int, *, stands_for: float, carry: Carry
) -> tuple[Part, tuple[Part, Part] | None]:
    """A rollout as it is, and with its tail merged at the moment, and on as many workers, as takes fewest
    worker-seconds (None if that saves nothing). Each worker of ``sequences`` ``stands_for`` so many."""
    seconds, small_s, prefill_s, moment_s, on, rest_s, work_s, small = _rollout(
        *sequences, slots, steps.base_s[0], steps.context_s[0], stands_for,
        carry.fixed_s + carry.move_s, min(carry.lane_s, carry.token_s), LATENCY,
    )  # fmt: skip
    busy = np.ones(len(seconds))
    whole = Part(seconds, busy, small_s, prefill_s)
    if on == 0 or work_s > (1.0 - MARGIN) * float(seconds.sum()) * stands_for:
        return whole, None
    before_s = np.minimum(seconds, moment_s)
    first = Part(before_s, busy, np.maximum(small_s - (seconds - before_s), 0.0), prefill_s)
    cells = -int(-on // stands_for)
    inside = (np.arange(len(seconds)) < cells).astype(float)
    second = Part(
        inside * rest_s, busy * (on / (stands_for * cells)), inside * (rest_s if small else 0.0), inside * 0.0
    )
    return whole, (first, second)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _rollout(
    left, context, admit_s, bounds, slots, base_s, context_s, stands_for, fixed_s, token_s, latency
):  # fmt: skip
    """Of each worker: solo seconds, those of few sequences, of prompts; and of the best moment to merge its tail: that
    moment, and what :func:`_best_tail` says (on no worker: there is none)."""
    n, workers = len(left), len(bounds) - 1
    seconds, small_s, prefill_s = np.zeros(workers), np.zeros(workers), np.zeros(workers)
    end_s, nothing = np.zeros(n), np.zeros((0, n), np.int64)
    run(
        left,
        context,
        admit_s,
        bounds,
        slots,
        base_s,
        context_s,
        np.zeros(0),
        seconds,
        small_s,
        prefill_s,
        end_s,
        nothing,
    )
    if n < 2 or workers * stands_for < 2:
        return seconds, small_s, prefill_s, 0.0, 0, 0.0, 0.0, False
    ends, moments_s, count, alive = np.sort(end_s), np.zeros(MOST_MOMENTS), 0, n // 2
    while alive > 0 and count < MOST_MOMENTS:
        if count == 0 or ends[n - 1 - alive] > moments_s[count - 1]:
            moments_s[count] = ends[n - 1 - alive]
            count += 1
        alive //= 2
    moments_s = moments_s[:count]
    rest, scratch = np.zeros((count, n), np.int64), np.zeros((3, workers))
    run(
        left,
        context,
        admit_s,
        bounds,
        slots,
        base_s,
        context_s,
        moments_s,
        scratch[0],
        scratch[1],
        scratch[2],
        end_s,
        rest,
    )
    best, on, rest_s, work_s, small = _best_tail(
        rest, left, context, moments_s, seconds, stands_for, slots, base_s, context_s, fixed_s, token_s, latency
    )
    return seconds, small_s, prefill_s, moments_s[max(best, 0)], on, rest_s, work_s, small


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _best_tail(
    rest, left, context, moments_s, seconds, stands_for, slots, base_s, context_s, fixed_s, token_s, latency
):
    """(moment, workers, solo seconds of each of these, worker-seconds of everything, whether it is of few
    sequences)."""
    best, best_on, best_s, best_work_s, few = -1, 0, 0.0, np.inf, False
    longest_s = seconds.max()
    for m in range(len(moments_s)):
        alive = np.flatnonzero(rest[m] > 0)
        if len(alive) == 0:
            continue
        alive = alive[np.argsort(-rest[m][alive])]
        before_s = 0.0
        for s in seconds:
            before_s += min(s, moments_s[m]) * stands_for
        on = 1
        while on < len(seconds) * stands_for:
            # One of `on` workers, the one with the longest of them: every so-many-th in the order of what is left.
            n = min(int(np.ceil(len(alive) * stands_for / on)), slots)
            if n < len(alive) * stands_for / on:
                on *= 2
                continue
            read, carried, tokens = 0.0, 0.0, 0.0
            for i in range(n):
                j = alive[min(int(i * on / stands_for), len(alive) - 1)]
                held = context[j] + left[j] - rest[m, j]
                read += held
                carried += held * token_s
                tokens += rest[m, j]
            time_s, step = fixed_s + carried, 0
            for i in range(n - 1, -1, -1):
                j = alive[min(int(i * on / stands_for), len(alive) - 1)]
                steps, batch = rest[m, j] - step, i + 1
                if steps > 0:
                    time_s += steps * base_s[min(batch, len(base_s) - 1)]
                    time_s += context_s[min(batch, len(base_s) - 1)] * (
                        steps * read + batch * (steps * (steps - 1) // 2)
                    )
                    read += batch * steps
                    step = rest[m, j]
                read -= context[j] + left[j]
            work_s = before_s + on * time_s
            if work_s < best_work_s and moments_s[m] + time_s <= latency * longest_s:
                best, best_on, best_s, best_work_s = m, on, time_s, work_s
                few = tokens <= FEW * rest[m, alive[0]]
            on *= 2
    return best, best_on, best_s, best_work_s, few


def warm_up() -> None:
    """Compile the kernel, or load it."""
    one = np.ones(1, np.int64)
    steps = Steps(one, np.ones((1, 2)), np.ones((1, 2)), np.ones(1))
    sequences = Sequences(one, one, np.array([RUNS]), np.array([0, 1]))
    rollout(sequences, steps, 1, stands_for=2.0, carry=Carry(0.0, 0.0, 0.0, 0.0))
