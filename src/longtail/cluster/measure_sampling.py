"""Decode steps by batch and context, and prefill by chunk, of one tensor-parallel degree; all its groups at once.

That is how they run: workers of one machine share its memory's bandwidth, and a step of one takes longer beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from longtail.cluster.measure_rig import STEPS, Rig
from longtail.cluster.measure_together import Pace, Together
from longtail.costs.table import DecodeGrid, PrefillCosts

COARSE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FINE_BATCHES = (
    *(1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128),
    *(160, 192, 256, 320, 384, 512, 768, 1024),
)  # fmt: skip
"""Kernels take rows in tiles of 4 (``engine/simd.py``): whole tiles, and one row more."""
ANCHORS = (1, 4, 16)
"""Batches that are measured first, and however long it takes: a table without them would be guesswork."""
LEAST_BATCHES = 2
SLACK = 0.03
"""A step may seem to take so much longer than one of more work, and be believed."""


class Points(NamedTuple):
    """Which decode steps are to be measured: every batch with every context. Contexts ascend, batches are in the order
    in which they are to be measured."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]


class Room(NamedTuple):
    """``columns`` blocks of ``block_tokens`` tokens for each KV head are what made-up sequences may take."""

    columns: int
    block_tokens: int

    def holds(self, batch: int, context: int) -> bool:
        return batch * -(-(context + STEPS) // self.block_tokens) <= self.columns

    def longest(self, batch: int) -> int:
        """The most tokens that each of ``batch`` sequences may have; 0 or less: none."""
        return self.columns // batch * self.block_tokens - STEPS


def choose_contexts(room: Room, *, batch: int, max_tokens: int, max_context: int, most: int, count: int) -> list[int]:
    """Up to ``count`` contexts, ascending, from short to as long as sequences get; fewer than two where nothing fits.

    The longest fits ``batch`` times, or has ``max_tokens``, whichever is longer; but two of it must fit.
    """
    longest = min(max(room.longest(batch), max_tokens, 2), room.longest(LEAST_BATCHES), max_context - STEPS, most)
    if longest < 2:
        return []
    shortest = max(1, min(32, longest // 4))
    between = [longest * i // (count - 1) for i in range(1, count - 1)]
    return sorted({shortest, *(c for c in between if c > shortest), longest})


def choose_batches(candidates: Sequence[int], most: int, room: Room, context: int) -> tuple[int, ...]:
    """Those up to ``most``, and it, of which each fits with ``context`` tokens per sequence; ``ANCHORS`` first."""
    most = max(most, LEAST_BATCHES)
    fitting = [b for b in {*candidates, most} if b <= most and room.holds(b, context)]
    return tuple(sorted(fitting, key=lambda batch: (batch not in ANCHORS, batch)))


def decode_grid(
    together: Together,
    rig: Rig | None,
    points: Points,
    *,
    pace: Pace,
    budget_s: float,
    rounds: int,
    again: int,
    tell: Callable[[int, float], None],
) -> DecodeGrid:
    """Measure ``points``, each in ``rounds`` rounds, whose median counts; larger batches are left out when ``budget_s``
    would not suffice. Up to ``again`` points are measured once more that took longer than a larger batch, or a longer
    context, does. ``rig`` is this worker's part of a group, or None; ``tell`` gets each batch and the share done.
    """
    rows: dict[int, list[list[float]]] = {}
    row_s: dict[int, float] = {}
    for batch in points.batches:
        spent_s = sum(row_s.values())
        smaller = max((b for b in rows if b < batch), default=0)
        expected_s = row_s[smaller] * batch / smaller if smaller else 0.0
        sparable = len(rows) >= LEAST_BATCHES and batch not in ANCHORS
        if sparable and spent_s + expected_s > budget_s / rounds:
            break
        tell(batch, spent_s / budget_s)
        row = [step_s(together, rig, batch, context, pace) for context in points.contexts]
        rows[batch] = [[seconds] for seconds in row]
        row_s[batch] = sum(seconds * (1 + pace.repeats(seconds)) for seconds in row)
    for number in range(1, rounds):
        for i, batch in enumerate(reversed(rows)):
            tell(batch, (number + i / len(rows)) / rounds)
            for cell, context in zip(rows[batch], points.contexts, strict=True):
                cell.append(step_s(together, rig, batch, context, pace))
    batches = tuple(sorted(rows))
    for _ in range(again):
        found = contradiction(np.array([[_lower_median(cell) for cell in rows[batch]] for batch in batches]))
        if found is None:
            break
        batch, context = batches[found[0]], points.contexts[found[1]]
        tell(batch, 1.0)
        rows[batch][found[1]].append(step_s(together, rig, batch, context, pace))
    return DecodeGrid(
        batches=batches,
        contexts=points.contexts,
        seconds=tuple(tuple(map(_lower_median, rows[batch])) for batch in batches),
    )


def contradiction(seconds: np.ndarray) -> tuple[int, int] | None:
    """(batch, context) by number in ``seconds`` of what took longest beside more work; None: by ``SLACK`` at most.

    Something else was going on there, since disturbances only ever add time.
    """
    excess = np.ones_like(seconds)
    excess[:-1] = np.maximum(excess[:-1], seconds[:-1] / seconds[1:])
    excess[:, :-1] = np.maximum(excess[:, :-1], seconds[:, :-1] / seconds[:, 1:])
    if excess.max() <= 1 + SLACK:
        return None
    batch, context = np.unravel_index(int(excess.argmax()), excess.shape)
    return int(batch), int(context)


def _lower_median(times: list[float]) -> float:
    return sorted(times)[(len(times) - 1) // 2]


def step_s(together: Together, rig: Rig | None, batch: int, context: int, pace: Pace) -> float:
    """Median seconds of decode steps of ``batch`` sequences around ``context`` tokens each."""
    if rig is None:
        return together.median_s(None, pace)
    rig.fill(batch, max(1, context - min(STEPS, pace.most + 1) // 2))
    seconds = together.median_s(rig.step, pace)
    rig.clear()
    return seconds


def prefill_costs(together: Together, rig: Rig | None, chunks: Sequence[int], pace: Pace) -> PrefillCosts:
    """Seconds per token for ``chunks`` (ascending) of a prompt; each is one quantum."""
    taken = [together.median_s(None if rig is None else partial(rig.prefill, n), pace) for n in chunks]
    per_token = tuple(seconds / n for seconds, n in zip(taken, chunks, strict=True))
    return PrefillCosts(chunk_tokens=tuple(chunks), seconds_per_token=per_token)


def between(grid: DecodeGrid, room: Room, count: int) -> list[tuple[int, int]]:
    """Up to ``count`` (batch, context) that the grid does not have: to see how well it foretells them."""
    low, high = grid.contexts[0], grid.contexts[-1]
    contexts = [c for c in (low + (high - low) * 5 // 8, low + (high - low) // 8) if c not in grid.contexts]
    batches = [(a + b) // 2 for a, b in pairwise(grid.batches) if b - a > 1] or list(grid.batches)
    held_out = [(b, contexts[i % len(contexts)]) for i, b in enumerate(batches)] if contexts else []
    step = -(-len(held_out) // count) or 1
    return [point for point in held_out[::step] if room.holds(*point)]
