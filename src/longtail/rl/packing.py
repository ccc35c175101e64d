"""Groups packed into the micro-batches of a step, which are then handed out to whichever worker is free.

Invariants: every sample with at least one token is in exactly one micro-batch; no micro-batch is empty; none has
more than ``micro_tokens`` tokens unless it holds a single sample; the plan is a pure function of the arguments.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longtail.core.types import TrainGroup

ATTENTION_SCALE = 4096
"""Context at which attention costs about as much as the linear layers (6 x hidden size, for a hidden size near 700)."""
PIECES = 4
"""Micro-batches per worker beyond which a step is not cut finer for the sake of handing them out evenly."""
USUAL_PIECES = 3
"""A usual micro-batch has this part of a worker's share of a step."""
MOST_TAPERED = 100_000
"""Parts of groups times workers, beyond which the last micro-batches of a step are as large as the others: the plan is
made between two steps, by a controller that others wait for."""
LEAST_TOKENS = 128
"""Tokens of a micro-batch below which a step is not cut finer than one per worker: small matrix products are slow."""
OVERHEAD = 50
"""What a micro-batch costs beside its tokens, in tokens' worth of compute: among it one pass over the sum of all
gradients. 45 to 60 were measured for models of 2M and 135M parameters on a CPU."""


@dataclass(frozen=True)
class MicroBatch:
    """Groups (or parts of groups) that one forward and backward pass computes together."""

    groups: tuple[TrainGroup, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the pass computes: each group's prompt once, each completion once."""
        return sum(g.tokens for g in self.groups)

    @property
    def completion_tokens(self) -> int:
        return sum(len(s.tokens) for g in self.groups for s in g.samples)

    @property
    def samples(self) -> int:
        return sum(len(g.samples) for g in self.groups)

    @property
    def cost(self) -> float:
        """Compute of the pass, in tokens' worth of linear layers."""
        return OVERHEAD + sum(estimated_cost(g) for g in self.groups)


def plan_micro_batches(groups: Sequence[TrainGroup], *, workers: int, micro_tokens: int) -> list[MicroBatch]:
    """The micro-batches of a step, costliest first: to be handed out in this order, to whichever worker is free.

    Finer ones even out workers of different speeds, but each costs something of its own, and each part of a group that
    is split computes the prompt again. So they are all of a size, or the last ones are small (factoring; Hummel,
    Schonberg and Flynn, 1992), which costs less for as even an end. Of plans that begin with at most a ``PIECES``-th of
    a worker's share it is the one that ends first at the latest, if nobody waits while there is work.
    """
    if workers < 1 or micro_tokens < 1:
        raise ValueError(f"workers and micro_tokens must be positive, got {workers} and {micro_tokens}")
    whole = [part for g in groups for part in _split(g, micro_tokens)]
    total = sum(part.tokens for part in whole)
    plans = []
    for pieces in range(1, PIECES + 1):
        least = min(LEAST_TOKENS if pieces > 1 else 1, micro_tokens)
        room = min(micro_tokens, max(least, -(-total // (workers * pieces))))
        finer = [part for g in groups for part in _split(g, min(micro_tokens, len(g.prompt) + room))]
        plans += [_join_small(_pack(parts, room), least, micro_tokens) for parts in (whole, finer)]
    if workers > 1 and len(whole) * workers <= MOST_TAPERED:
        least = min(LEAST_TOKENS, micro_tokens)
        plans += [
            _join_small(_tapered(whole, total, workers * pieces, workers, least, micro_tokens), least, micro_tokens)
            for pieces in range(2, PIECES + 1)
        ]
    best = min(plans, key=lambda plan: _latest_end([batch.cost for batch in plan], workers))
    return sorted(best, key=lambda batch: -batch.cost)


def usual_tokens(total: int, *, workers: int, micro_tokens: int) -> int:
    """About what a micro-batch has of a step of ``total`` tokens."""
    return min(micro_tokens, max(LEAST_TOKENS, -(-total // (USUAL_PIECES * workers))))


def with_signal(groups: Iterable[TrainGroup]) -> list[TrainGroup]:
    """The groups in which some advantage is not 0. Without a KL penalty (``beta`` 0) the others have no gradient,
    so that leaving them out changes no weight, provided that :class:`StepTotals` still counts them."""
    return [g for g in groups if any(s.advantage != 0.0 for s in g.samples)]


def estimated_cost(group: TrainGroup) -> float:
    """Compute of one pass over ``group``, in tokens' worth of linear layers: tokens plus attention area."""
    prompt = len(group.prompt)
    area = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in (len(s.tokens) for s in group.samples))
    return group.tokens + area / ATTENTION_SCALE


def _latest_end(costs: Iterable[float], workers: int) -> float:
    """When workers of the same speed have done all at the latest, if the costliest are handed out first and none of
    them waits while there is work: whichever is the last one to end was begun when all workers were busy with those
    before it (list scheduling; Graham, 1969)."""
    end = before = 0.0
    for cost in sorted(costs, reverse=True):
        end = max(end, before / workers + cost)
        before += cost
    return max(end, before / workers)


def _split(group: TrainGroup, budget: int) -> list[TrainGroup]:
    """Parts of at most ``budget`` tokens with the prompt, or of a single sample; samples without tokens are dropped."""
    longest_first = sorted((s for s in group.samples if len(s.tokens)), key=lambda s: -len(s.tokens))
    bins = _best_fit([len(s.tokens) for s in longest_first], budget - len(group.prompt))
    return [TrainGroup(prompt=group.prompt, samples=tuple(longest_first[i] for i in b)) for b in bins]


def _pack(parts: list[TrainGroup], budget: int) -> list[MicroBatch]:
    """Best-fit decreasing; parts of more than ``budget`` tokens stand alone."""
    largest_first = sorted(parts, key=lambda p: -p.tokens)
    bins = _best_fit([p.tokens for p in largest_first], budget)
    return [MicroBatch(tuple(largest_first[i] for i in b)) for b in bins]


def _tapered(
    groups: Sequence[TrainGroup], total: int, parts: int, workers: int, least: int, most: int
) -> list[MicroBatch]:
    """Rounds of one for each of ``workers``, each of a ``parts``-th of the tokens that are left of ``total``; from
    ``least`` to ``most`` tokens each."""
    left = sorted(((g.tokens, g) for g in groups), key=_tokens, reverse=True)
    batches: list[MicroBatch] = []
    bulk = 0
    while bulk < len(left) and total > parts * most:  # all rounds of which would have ``most``
        total -= left[bulk][0]
        bulk += 1
    batches, left = _pack([group for _, group in left[:bulk]], most), left[bulk:]
    while left:
        room = min(most, max(least, -(-total // parts)))
        for _ in range(workers):
            if left:
                batches.append(_take(left, room))
                total -= batches[-1].tokens
    return batches


_Sized = tuple[int, TrainGroup]
"""A group and its tokens."""


def _tokens(sized: _Sized) -> int:
    return sized[0]


def _take(left: list[_Sized], room: int) -> MicroBatch:
    """Remove about ``room`` tokens from ``left``, largest group first: whole groups that fit, and a part of one where
    otherwise more than half would stay free; the longest sample where nothing fits."""
    taken: list[TrainGroup] = []
    rests: list[TrainGroup] = []
    free, i = room, 0
    while i < len(left) and (free >= left[-1][0] or 2 * free > room):
        tokens, group = left[i]
        if tokens <= free:
            taken.append(group)
            free -= tokens
            del left[i]
        elif 2 * free > room and (cut := _cut(group, free)) is not None:
            taken.append(cut[0])
            rests.append(cut[1])
            free -= cut[0].tokens
            del left[i]
        else:
            i += 1
    if not taken:
        i = max(range(len(left)), key=lambda i: len(left[i][1].samples[0].tokens) + len(left[i][1].prompt))
        longest, rest = _apart(left.pop(i)[1], [0])
        taken.append(longest)
        rests += [rest] if rest.samples else []
    if rests:
        left += [(rest.tokens, rest) for rest in rests]
        left.sort(key=_tokens, reverse=True)
    return MicroBatch(tuple(taken))


def _cut(group: TrainGroup, budget: int) -> tuple[TrainGroup, TrainGroup] | None:
    """The samples of ``group``, longest first, that fit into ``budget`` tokens with the prompt, and the others; None if
    none does."""
    chosen, free = [], budget - len(group.prompt)
    for i, sample in enumerate(group.samples):
        if len(sample.tokens) <= free:
            chosen.append(i)
            free -= len(sample.tokens)
    return _apart(group, chosen) if chosen else None


def _apart(group: TrainGroup, chosen: Sequence[int]) -> tuple[TrainGroup, TrainGroup]:
    """The ``chosen`` samples of ``group``, and the others."""
    inside = set(chosen)
    others = tuple(s for i, s in enumerate(group.samples) if i not in inside)
    return (
        TrainGroup(prompt=group.prompt, samples=tuple(group.samples[i] for i in chosen)),
        TrainGroup(prompt=group.prompt, samples=others),
    )


def _join_small(batches: list[MicroBatch], least: int, most: int) -> list[MicroBatch]:
    """Join the two smallest while one has fewer than ``least`` tokens and both together no more than ``most``."""
    heap = [(batch.tokens, number, batch) for number, batch in enumerate(batches)]
    heapq.heapify(heap)
    while len(heap) > 1 and heap[0][0] < least:
        smallest = tokens, _, small = heapq.heappop(heap)
        more, number, other = heap[0]
        if tokens + more > most:
            heapq.heappush(heap, smallest)
            break
        heapq.heapreplace(heap, (tokens + more, number, MicroBatch(other.groups + small.groups)))
    return [batch for _, _, batch in sorted(heap, key=lambda entry: entry[1])]


def _best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of ``room``, each in the fullest bin where it fits; too large ones stand alone."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of each bin that has room left: how much, and which it is
    for i, size in enumerate(sizes):
        at = bisect_left(free, (size, 0))
        if at < len(free):
            left, b = free.pop(at)
        else:
            left, b = room, len(bins)
            bins.append([])
        bins[b].append(i)
        if left > size:
            insort(free, (left - size, b))
    return bins
