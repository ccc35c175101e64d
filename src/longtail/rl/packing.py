"""Which worker trains on what: groups split, balanced over workers and packed into micro-batches.

Invariants: every sample with at least one token is in exactly one micro-batch; no micro-batch is empty; none has
more than ``micro_tokens`` tokens unless it holds a single sample; the plan is a pure function of the arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longtail.core.types import TrainGroup, TrainSample

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

    Groups larger than ``micro_tokens`` or than a worker's even share are split (each part computes the prompt
    again). Parts go to workers by longest processing time first, then into as few micro-batches as first-fit
    decreasing finds. With fewer samples than workers, some workers get none.
    """
    if workers < 1 or micro_tokens < 1:
        raise ValueError(f"workers and micro_tokens must be positive, got {workers} and {micro_tokens}")
    groups = [_without_empty(g) for g in groups]
    share = -(-sum(g.tokens for g in groups) // workers)
    parts = [p for g in groups for p in _split(g, min(micro_tokens, share))]
    order = sorted(range(len(parts)), key=lambda i: (-estimated_cost(parts[i]), i))
    loads: list[tuple[float, int]] = [(0.0, w) for w in range(workers)]
    assigned: list[list[TrainGroup]] = [[] for _ in range(workers)]
    for i in order:
        load, worker = heapq.heappop(loads)
        assigned[worker].append(parts[i])
        heapq.heappush(loads, (load + estimated_cost(parts[i]), worker))
    return [_pack(mine, micro_tokens) for mine in assigned]


def with_signal(groups: Iterable[TrainGroup]) -> list[TrainGroup]:
    """The groups in which some advantage is not 0. Without a KL penalty (``beta`` 0) the others have no gradient,
    so that leaving them out changes no weight, provided that :class:`StepTotals` still counts them."""
    return [g for g in groups if any(s.advantage != 0.0 for s in g.samples)]


def estimated_cost(group: TrainGroup) -> float:
    """Compute of one pass over ``group``, in tokens' worth of linear layers: tokens plus attention area."""
    prompt = len(group.prompt)
    area = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in (len(s.tokens) for s in group.samples))
    return group.tokens + area / ATTENTION_SCALE


def _without_empty(group: TrainGroup) -> TrainGroup:
    return TrainGroup(prompt=group.prompt, samples=tuple(s for s in group.samples if len(s.tokens)))


def _split(group: TrainGroup, budget: int) -> list[TrainGroup]:
    """Consecutive samples in parts of at most ``budget`` tokens with the prompt; at least one sample in each."""
    parts: list[list[TrainSample]] = []
    used = budget
    for sample in group.samples:
        if used + len(sample.tokens) > budget:
            parts.append([])
            used = len(group.prompt)
        parts[-1].append(sample)
        used += len(sample.tokens)
    return [TrainGroup(prompt=group.prompt, samples=tuple(p)) for p in parts]


def _pack(parts: list[TrainGroup], budget: int) -> list[MicroBatch]:
    """First-fit decreasing by tokens."""
    bins: list[list[TrainGroup]] = []
    free: list[int] = []
    for part in sorted(parts, key=lambda p: -p.tokens):
        slot = next((i for i, room in enumerate(free) if part.tokens <= room), None)
        if slot is None:
            slot = len(bins)
            bins.append([])
            free.append(budget)
        bins[slot].append(part)
        free[slot] -= part.tokens
    return [MicroBatch(tuple(b)) for b in bins]
