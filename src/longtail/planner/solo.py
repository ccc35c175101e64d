"""Solo seconds: how long workers take with their sequences, each on its own and with nothing else to do.

Nothing happens between two ends, so time jumps from end to end, as in ``rollout_time.py``: a sequence that ends makes
room for the next that waits on the same worker. A worker that gives a tenant a part of its time is as far in its
sequences after t seconds as a worker of its own is after that part of t, so these seconds are all that sharing has to
know of a rollout.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numba
import numpy as np

from longtail.costs.table import CostTable

FEW = 4
"""Decode steps of up to so many sequences are the class ``decode_small``: they read weights, and little else."""
RUNS = -1.0
"""In ``admit_s``: the sequence runs already."""
NEVER = np.zeros(0)


class Sequences(NamedTuple):
    """n sequences by worker: those of worker w are at ``bounds[w]`` to ``bounds[w + 1]``, those that run first, then in
    the order in which they begin.

    ``left`` int64 [n]: tokens to come, at least 1. ``context`` int64 [n]: tokens so far. ``admit_s`` [n]: seconds for
    computing those when its turn comes, which draws the next token; or :data:`RUNS`.
    """

    left: np.ndarray
    context: np.ndarray
    admit_s: np.ndarray
    bounds: np.ndarray

    @property
    def workers(self) -> int:
        return len(self.bounds) - 1

    def dealt(self, worker: np.ndarray, workers: int) -> Sequences:
        """The same ones, each on ``worker`` [n]."""
        return Sequences(*_by_worker(self.left, self.context, self.admit_s, worker, workers))


class Solo(NamedTuple):
    """Of each worker [w]: ``seconds`` to its last end, of which ``small_s`` in decode steps of at most :data:`FEW`
    sequences and ``prefill_s`` for prompts. Of each sequence: when it ends (``end_s`` [n]), and its tokens to come
    (``rest`` [T, n], 0: none) at each of T moments."""

    seconds: np.ndarray
    small_s: np.ndarray
    prefill_s: np.ndarray
    end_s: np.ndarray
    rest: np.ndarray


class Steps(NamedTuple):
    """Decode steps by degree (``degrees`` [D], ascending) and batch, as :meth:`CostTable.arrays` has them, [D, B + 1]
    each; ``prefill_s`` [D] for each token of a prompt."""

    degrees: np.ndarray
    base_s: np.ndarray
    context_s: np.ndarray
    prefill_s: np.ndarray

    @classmethod
    def of(cls, table: CostTable, most: int, widest: int) -> Steps:
        """For batches up to ``most``; degrees above ``widest`` are left out."""
        degrees = [d for d in table.degrees if d <= widest] or [table.degrees[0]]
        lines = [table.arrays(degree, most) for degree in degrees]
        return cls(
            np.array(degrees, np.int64),
            np.stack([line.base_s for line in lines]),
            np.stack([line.context_s for line in lines]),
            np.array([table.prefill[degree].token_s for degree in degrees]),
        )


def solo(sequences: Sequences, steps: Steps, slots: int, moments_s: np.ndarray = NEVER) -> Solo:
    """Each worker on its own, ``slots`` sequences at once; ``moments_s`` ascend."""
    n, workers = len(sequences.left), sequences.workers
    out = Solo(
        np.zeros(workers), np.zeros(workers), np.zeros(workers), np.zeros(n), np.zeros((len(moments_s), n), np.int64)
    )
    run(*sequences, slots, steps.base_s[0], steps.context_s[0], moments_s, *out)
    return out


def widened_s(left: np.ndarray, context: np.ndarray, steps: Steps, slots: int, width: int) -> float:
    """Seconds until all these sequences have ended on ``width`` workers that form, at every moment, groups of the
    degree with which a step of all of them is shortest, even ones."""
    return _widened(np.sort(left), float(context.sum()), steps.degrees, steps.base_s, steps.context_s, slots, width)


def longest_first(left: np.ndarray, workers: int, load: np.ndarray | None = None) -> np.ndarray:
    """The worker [n] of each sequence: longest first, each to whoever has fewest tokens (``load`` at first)."""
    order = np.argsort(-left, kind="stable")
    return _deal(order, left.astype(float), np.zeros(workers) if load is None else load.astype(float))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _by_worker(left, context, admit_s, worker, workers):
    """:meth:`Sequences.dealt` as a kernel; who runs, and who waits, stay in their order."""
    bounds, n = np.zeros(workers + 1, np.int64), len(worker)
    for i in range(n):
        bounds[worker[i] + 1] += 1
    for w in range(workers):
        bounds[w + 1] += bounds[w]
    place = bounds[:-1].copy()
    lefts, contexts, admits_s = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n)
    for runs in (True, False):
        for i in range(n):
            if (admit_s[i] == RUNS) == runs:
                at = place[worker[i]]
                lefts[at], contexts[at], admits_s[at] = left[i], context[i], admit_s[i]
                place[worker[i]] += 1
    return lefts, contexts, admits_s, bounds


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _deal(order, tokens, load):
    to = np.empty(len(order), np.int64)
    heap = [(load[w], w) for w in range(len(load))]
    heapq.heapify(heap)
    for i in order:
        least, w = heapq.heappop(heap)
        to[i] = w
        heapq.heappush(heap, (least + tokens[i], w))
    return to


@numba.njit(cache=True, nogil=True, error_model="numpy")
def run(left, context, admit_s, bounds, slots, base_s, context_s, moments_s, seconds, small_s, prefill_s, end_s, rest):
    """:func:`solo` as a kernel; writes to its last five arguments."""
    most = 1
    for w in range(len(bounds) - 1):
        most = max(most, bounds[w + 1] - bounds[w])
    who, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    for w in range(len(bounds) - 1):
        first, last = bounds[w], bounds[w + 1]
        # who[head:tail] run, in the order of their ends, which are steps of this worker; from `waits` on they wait.
        time_s, step, read, head, tail, waits, moment = 0.0, 0, 0, 0, 0, first, 0
        while True:
            while waits < last and tail - head < slots:
                tokens, held = left[waits], context[waits]
                if admit_s[waits] >= 0.0:
                    time_s += admit_s[waits]
                    prefill_s[w] += admit_s[waits]
                    tokens -= 1
                    held += 1
                if tokens > 0:
                    ends[waits - first] = step + tokens
                    place = tail
                    while place > head and ends[who[place - 1] - first] > step + tokens:
                        who[place] = who[place - 1]
                        place -= 1
                    who[place] = waits
                    tail += 1
                    read += held
                else:
                    end_s[waits] = time_s
                waits += 1
            if head == tail:
                break
            n, steps = tail - head, ends[who[head] - first] - step
            span_s = steps * base_s[n] + context_s[n] * (steps * read + n * (steps * (steps - 1) // 2))
            while moment < len(moments_s) and moments_s[moment] < time_s + span_s:
                done = np.int64(steps * max(0.0, moments_s[moment] - time_s) / span_s)
                for j in range(head, tail):
                    rest[moment, who[j]] = ends[who[j] - first] - step - done
                for i in range(waits, last):
                    rest[moment, i] = left[i]
                moment += 1
            time_s += span_s
            step += steps
            read += n * steps
            if n <= FEW:
                small_s[w] += span_s
            while head < tail and ends[who[head] - first] == step:
                i = who[head]
                end_s[i] = time_s
                read -= context[i] + left[i]
                head += 1
        seconds[w] = time_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _widened(left, read, degrees, base_s, context_s, slots, width):
    """``left`` ascends; ``read`` tokens of context."""
    time_s, step = 0.0, 0
    for i in range(len(left)):
        steps, n = left[i] - step, len(left) - i
        if steps > 0:
            mean = read + 0.5 * n * (steps - 1)
            best_s = np.inf
            for d in range(len(degrees)):
                if degrees[d] > width:
                    break
                groups = max(1, width // degrees[d])
                running = min(n, slots * groups)
                batch = (running + groups - 1) // groups
                step_s = base_s[d, batch] + context_s[d, batch] * mean * batch / n
                best_s = min(best_s, step_s * n / running)
            time_s += steps * best_s
            step = left[i]
            read += n * steps
        read -= read / n
    return time_s


def warm_up() -> None:
    """Compile the kernels, or load them."""
    one = np.ones(1, np.int64)
    steps = Steps(one, np.ones((1, 2)), np.ones((1, 2)), np.ones(1))
    sequences = Sequences(one, one, np.array([RUNS]), np.array([0, 1]))
    solo(sequences.dealt(one - 1, 1), steps, 1, np.zeros(1))
    widened_s(one, one, steps, 1, 1)
    longest_first(one, 1)
