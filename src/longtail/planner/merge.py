"""Merge: the tail of a rollout on few workers, and spread: on more of them again. What it takes, and what it saves.

A decode step of few sequences costs little less than one of many, so a tail that is decoded on one worker takes far
fewer worker-seconds than the same tail on all of them. What others do with the workers that get free pays for it; the
pipeline itself ends its rollout a little later. Moving sequences has its price: the workers concerned wait for each
other, and each sequence that moves has its lanes sent or computed again, whichever is cheaper. So long prefixes are
not moved for a short rest: to re-home contexts of tens of thousands of tokens eagerly makes steps slower, not faster.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numba
import numpy as np

from longtail.planner.cells import Cells
from longtail.planner.graph import Part
from longtail.planner.plans import MARGIN
from longtail.planner.solo import RUNS, Sequences, Solo, Steps, longest_first, solo
from longtail.planner.state import PipelineState
from longtail.planner.tail import Carry, rollout


class What(StrEnum):
    STAY = "stay"
    LATER = "later"
    """Stay now, and merge when fewer are left."""
    MERGE = "merge"
    SPREAD = "spread"


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

    @cached_property
    def held(self) -> np.ndarray:
        """Sequences of each worker, int64 [W]."""
        return np.bincount(self.worker, minlength=self.workers)

    @cached_property
    def _longest_first(self) -> np.ndarray:
        return np.argsort(-self.left, kind="stable")

    def merged(self, to: tuple[int, ...]) -> np.ndarray:
        """The worker [n] of each if all go to ``to``: who is there stays, the others go to who has fewest tokens."""
        return _merged(np.array(to), self._longest_first, self.worker, self.left, self.workers)

    def spread(self, to: tuple[int, ...]) -> np.ndarray:
        """The same if they are dealt out evenly over ``to``."""
        return np.array(to)[longest_first(self.left, len(to))]

    def carry_s(self, worker: np.ndarray, carry: Carry) -> float:
        """Seconds for moving everyone to ``worker`` [n], the busiest worker's; without waiting for steps under way."""
        return float(_carry_s(self.worker, worker, self.lanes, self.context, self.workers, *carry))


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
    spreads: bool = True,
) -> list[Alternative]:
    """To stay (always the first), to merge later, to merge now to a half, a quarter and so on of the workers (of many
    workers, to fewer of these), to spread over all: each only if it may be of use, and merges only if they save more
    worker-seconds than they take.

    ``merges``, ``spreads``: whether such moves are asked for.
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
    holders = np.flatnonzero(present.held)
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
    if spreads and len(holders) < present.workers and len(present) > len(holders) and (present.lanes > 0).all():
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
    concerned = present.held > 0
    concerned[list(to)] = True
    after.seconds[concerned] += cost_s
    return _alternative(what, to, after, cells, cost_s, cost_s * int(np.count_nonzero(concerned)))


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
    if cells.count == cells.workers and offset % cells.workers == 0:
        return part
    return Part(*_by_cell(cells.bounds, offset, *part))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _merged(targets, order, worker, left, workers):
    """``order``: sequences, longest first."""
    at, to, load = np.full(workers, -1), worker.copy(), np.zeros(len(targets))
    for t in range(len(targets)):
        at[targets[t]] = t
    for i in range(len(left)):
        if at[worker[i]] >= 0:
            load[at[worker[i]]] += left[i]
    heap = [(load[t], t) for t in range(len(targets))]
    heapq.heapify(heap)
    for i in order:
        if at[worker[i]] < 0:
            least, t = heapq.heappop(heap)
            to[i] = targets[t]
            heapq.heappush(heap, (least + left[i], t))
    return to


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _carry_s(worker, to, lanes, context, workers, fixed_s, move_s, lane_s, token_s):
    taken, given, sent = np.zeros(workers), np.zeros(workers), False
    for i in range(len(to)):
        if to[i] != worker[i] and lanes[i] > 0:
            if lanes[i] * lane_s < context[i] * token_s:
                sent = True
                taken[to[i]] += lanes[i] * lane_s
                given[worker[i]] += lanes[i] * lane_s
            else:
                taken[to[i]] += context[i] * token_s
    return fixed_s + (move_s if sent else 0.0) + max(taken.max(), given.max())


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _by_cell(bounds, offset, solo_s, busy, small_s, prefill_s):
    cells, workers = len(bounds) - 1, len(solo_s)
    longest_s, mean, small, prefill = np.zeros(cells), np.ones(cells), np.zeros(cells), np.zeros(cells)
    for c in range(cells):
        size = bounds[c + 1] - bounds[c]
        work_s = 0.0
        for i in range(bounds[c], bounds[c + 1]):
            w = (i - offset) % workers
            longest_s[c] = max(longest_s[c], solo_s[w])
            work_s += solo_s[w] * busy[w]
            small[c] += small_s[w]
            prefill[c] += prefill_s[w]
        if longest_s[c] > 0.0:
            mean[c] = work_s / size / longest_s[c]
        small[c] /= size * max(mean[c], 1e-12)
        prefill[c] /= size
    return longest_s, mean, small, prefill


def warm_up() -> None:
    """Compile the kernels, or load them."""
    one, none = np.ones(1, np.int64), np.zeros(1, np.int64)
    _merged(none, none, none, one, 1)
    _carry_s(none, none, one, one, 1, 0.0, 0.0, 0.0, 0.0)
    _by_cell(np.array([0, 1]), 0, np.ones(1), np.ones(1), np.ones(1), np.ones(1))
