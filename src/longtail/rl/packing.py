"""Which worker trains on what: groups split, balanced over workers and packed into micro-batches.

Invariants: every sample with at least one token is in exactly one micro-batch; no micro-batch is empty; none has
more than ``micro_tokens`` tokens unless it holds a single sample; the plan is a pure function of the arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longtail.core.types import TrainGroup

ATTENTION_SCALE = 4096
"""Context at which attention costs about as much as the linear layers (6 x hidden size, for a hidden size near 700)."""


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


def plan_micro_batches(groups: Sequence[TrainGroup], *, workers: int, micro_tokens: int) -> list[list[MicroBatch]]:
    """The micro-batches of each worker, in the order in which it should run them.

    Groups larger than ``micro_tokens`` are split, and those larger than a worker's even share too if that ends the
    step earlier (each part computes the prompt again). Parts go to workers by longest processing time first, then
    into as few micro-batches as first-fit decreasing finds. With fewer samples than workers, some workers get none.
    """
    if workers < 1 or micro_tokens < 1:
        raise ValueError(f"workers and micro_tokens must be positive, got {workers} and {micro_tokens}")
    share = -(-sum(g.tokens for g in groups) // workers)
    whole = [part for g in groups for part in _split(g, micro_tokens)]
    finer = [part for g in groups for part in _split(g, min(micro_tokens, len(g.prompt) + share))]
    balanced = min((_balance(parts, workers) for parts in (whole, finer)), key=_makespan)
    return [_pack(parts, micro_tokens) for parts in balanced]


def with_signal(groups: Iterable[TrainGroup]) -> list[TrainGroup]:
    """The groups in which some advantage is not 0. Without a KL penalty (``beta`` 0) the others have no gradient,
    so that leaving them out changes no weight, provided that :class:`StepTotals` still counts them."""
    return [g for g in groups if any(s.advantage != 0.0 for s in g.samples)]


def estimated_cost(group: TrainGroup) -> float:
    """Compute of one pass over ``group``, in tokens' worth of linear layers: tokens plus attention area."""
    prompt = len(group.prompt)
    area = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in (len(s.tokens) for s in group.samples))
    return group.tokens + area / ATTENTION_SCALE


def _split(group: TrainGroup, budget: int) -> list[TrainGroup]:
    """Parts of at most ``budget`` tokens with the prompt, or of a single sample; samples without tokens are dropped."""
    longest_first = sorted((s for s in group.samples if len(s.tokens)), key=lambda s: -len(s.tokens))
    bins = _first_fit([len(s.tokens) for s in longest_first], budget - len(group.prompt))
    return [TrainGroup(prompt=group.prompt, samples=tuple(longest_first[i] for i in b)) for b in bins]


def _balance(parts: list[TrainGroup], workers: int) -> list[list[TrainGroup]]:
    """Longest processing time first: each part to the worker that has the least so far."""
    loads = [(0.0, worker) for worker in range(workers)]
    assigned: list[list[TrainGroup]] = [[] for _ in range(workers)]
    for part in sorted(parts, key=lambda p: -estimated_cost(p)):
        load, worker = heapq.heappop(loads)
        assigned[worker].append(part)
        heapq.heappush(loads, (load + estimated_cost(part), worker))
    return assigned


def _makespan(assigned: list[list[TrainGroup]]) -> float:
    return max(sum(estimated_cost(p) for p in parts) for parts in assigned)


def _pack(parts: list[TrainGroup], budget: int) -> list[MicroBatch]:
    largest_first = sorted(parts, key=lambda p: -p.tokens)
    bins = _first_fit([p.tokens for p in largest_first], budget)
    return [MicroBatch(tuple(largest_first[i] for i in b)) for b in bins]


def _first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of ``room``, each in the first bin where it fits; too large ones stand alone."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i, size in enumerate(sizes):
        b = next((b for b, left in enumerate(free) if size <= left), len(bins))
        if b == len(bins):
            bins.append([])
            free.append(room)
        bins[b].append(i)
        free[b] -= size
    return bins
