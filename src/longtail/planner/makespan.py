"""How long does a rollout take that is placed like this, if lengths come out like that?

Workers decode up to ``slots`` sequences at once, in the order of their queues; a sequence that ends makes room for the
next sample. Nothing happens between two ends, so the time jumps from one end to the next: time and memory are linear in
samples, whatever their lengths. The same rules as ``engine/scheduler.py``, without a limit of KV memory.

With ``late`` a request is bound to a worker only when that worker has fewer than ``slots + ahead`` samples: first
those of its own queue, then the first of the queue in which most tokens are left (``planner/dispatch.py`` does the
same in a run).
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

NOBODY = -1


@numba.njit(cache=True, nogil=True)
def makespan_s(
    lengths: np.ndarray,
    first: np.ndarray,
    prompt_tokens: np.ndarray,
    expected: np.ndarray,
    queue: np.ndarray,
    bounds: np.ndarray,
    late: bool,
    slots: int,
    ahead: int,
    costs: np.ndarray,
) -> float:
    """Seconds until the last sample has ended.

    ``lengths`` int64 [S]: tokens of every sample, those of request r at ``first[r]`` to ``first[r + 1]``;
    ``prompt_tokens`` and ``expected`` (tokens; says which queue is longest) [R]; ``queue`` int64 [R]: requests in
    dispatch order, those of worker w at ``bounds[w]`` to ``bounds[w + 1]``; ``costs`` float64 [W, 4]: the terms of
    :class:`~longtail.costs.decode.DecodeCosts`.
    """
    workers, requests = len(bounds) - 1, len(prompt_tokens)
    head = bounds[:-1].copy()
    left = np.zeros(workers)
    for w in range(workers):
        for i in range(bounds[w], bounds[w + 1]):
            left[w] += expected[queue[i]]
    request_of = np.empty(len(lengths), np.int64)
    for r in range(requests):
        request_of[first[r] : first[r + 1]] = r
    # Requests bound to a worker, as a linked list, and the next sample of the first one.
    after = np.full(requests, NOBODY)
    begin, end = np.full(workers, NOBODY), np.full(workers, NOBODY)
    sample = np.zeros(workers, np.int64)
    held = np.zeros(workers, np.int64)  # samples bound and not ended
    # Running samples by the step in which they end: a binary heap for each worker.
    places = min(slots, len(lengths))
    heaps = np.empty((workers, places), np.int64)
    ends = np.empty(len(lengths), np.int64)
    running, context, step = np.zeros(workers, np.int64), np.zeros(workers, np.int64), np.zeros(workers, np.int64)
    pending = [(0.0, 0) for _ in range(0)]
    last = 0.0
    for thief in range(2):  # everyone's own queue comes first
        for w in range(workers):
            _bind(
                w,
                thief == 1 and late,
                first,
                expected,
                queue,
                bounds,
                head,
                left,
                after,
                begin,
                end,
                held,
                slots + ahead,
            )
    for w in range(workers):
        heapq.heappush(pending, (0.0, w))
    while len(pending):
        now_s, w = heapq.heappop(pending)
        if running[w]:
            step[w] = ends[heaps[w, 0]]
            while running[w] and ends[heaps[w, 0]] == step[w]:
                ended = heaps[w, 0]
                running[w] -= 1
                held[w] -= 1
                context[w] -= prompt_tokens[request_of[ended]] + lengths[ended]
                _sift_down(heaps[w], running[w], ends)
            last = max(last, now_s)
        _bind(w, late, first, expected, queue, bounds, head, left, after, begin, end, held, slots + ahead)
        while begin[w] != NOBODY and running[w] < slots:
            r = begin[w]
            if sample[w] == 0:
                now_s += prompt_tokens[r] * costs[w, 3]
            s = first[r] + sample[w]
            sample[w] += 1
            if sample[w] == first[r + 1] - first[r]:
                begin[w], sample[w] = after[r], 0
            if lengths[s] > 1:  # the prefill draws the first token
                ends[s] = step[w] + lengths[s] - 1
                _sift_up(heaps[w], running[w], s, ends)
                running[w] += 1
                context[w] += prompt_tokens[r] + 1
            else:
                held[w] -= 1
                last = max(last, now_s)
                _bind(w, late, first, expected, queue, bounds, head, left, after, begin, end, held, slots + ahead)
        if running[w]:
            steps, n = ends[heaps[w, 0]] - step[w], running[w]
            tokens = steps * context[w] + n * (steps * (steps - 1) // 2)
            context[w] += n * steps
            now_s += steps * (costs[w, 0] + costs[w, 1] * n) + costs[w, 2] * tokens
            heapq.heappush(pending, (now_s, w))
    return last


@numba.njit(cache=True, nogil=True)
def _bind(w, steals, first, expected, queue, bounds, head, left, after, begin, end, held, room):
    """Bind requests to worker ``w`` while it has fewer than ``room`` samples."""
    while held[w] < room:
        victim = w
        if head[w] == bounds[w + 1]:
            if not steals:
                return
            victim = np.argmax(left)
            if head[victim] == bounds[victim + 1]:
                return
        r = queue[head[victim]]
        head[victim] += 1
        left[victim] = left[victim] - expected[r] if head[victim] < bounds[victim + 1] else 0.0
        held[w] += first[r + 1] - first[r]
        if begin[w] == NOBODY:
            begin[w] = r
        else:
            after[end[w]] = r
        end[w] = r


@numba.njit(cache=True, nogil=True)
def _sift_up(heap, size, item, key):
    """Add ``item`` to a heap of ``size`` items."""
    i = size
    while i > 0 and key[item] < key[heap[(i - 1) >> 1]]:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = item


@numba.njit(cache=True, nogil=True)
def _sift_down(heap, size, key):
    """Remove the first item of a heap, of which ``size`` are left."""
    if size == 0:
        return
    item, i = heap[size], 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[item]:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = item


@numba.njit(cache=True, nogil=True)
def deal(order: np.ndarray, tokens: np.ndarray, most: int, slots: int, costs: np.ndarray) -> np.ndarray:
    """The worker [R] of every request: each in ``order`` to the one that would end its tokens first, of those that
    have fewer than ``most`` requests.

    With full slots a token takes ``base / slots + per_sequence`` seconds. This is longest processing time first (Graham
    1969; for workers of unequal speed Gonzalez, Ibarra and Sahni 1977) where ``order`` is that.
    """
    workers = len(costs)
    load, count = np.zeros(workers), np.zeros(workers, np.int64)
    placed = np.empty(len(order), np.int64)
    for r in order:
        best, best_s = 0, np.inf
        for w in range(workers):
            s = (load[w] + tokens[r]) * (costs[w, 0] / slots + costs[w, 1])
            if s < best_s and count[w] < most:
                best, best_s = w, s
        placed[r] = best
        load[best] += tokens[r]
        count[best] += 1
    return placed
