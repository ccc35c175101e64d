"""The tail of a rollout that is to come: when is it best merged, and on how many workers?

Every moment at which half of the samples, a quarter and so on are left is tried, with each number of workers that is a
power of two; what is left then is known from the same simulation that says how long the rollout takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.graph import Part
from longtail.planner.plans import MARGIN
from longtail.planner.solo import FEW, RUNS, Sequences, Steps, run

LATENCY = 1.5
"""A merge that is planned ahead makes a rollout so many times longer at most, in solo seconds."""
MOST_MOMENTS = 6


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
