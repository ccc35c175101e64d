"""Workers in cells, so that looking ahead takes no longer with a thousand workers than with sixteen.

A cell is a range of neighbours that are taken to be alike: one of them stands for all. Up to sixteen workers each is a
cell of its own, and nothing is left out.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property

import numba
import numpy as np

from longtail.costs.table import CostTable
from longtail.planner.solo import Sequences
from longtail.planner.state import StepShape

MOST_CELLS = 16
FEWEST_CELLS = 4
MOST_ENTRIES = 32
"""Cells times pipelines, beyond :data:`FEWEST_CELLS` cells."""


@dataclass(frozen=True)
class Cells:
    """``count`` cells over ``workers`` workers, about equally large."""

    workers: int
    count: int

    @classmethod
    def over(cls, workers: int, pipelines: int) -> Cells:
        """As many as the number of pipelines leaves time for."""
        most = max(FEWEST_CELLS, min(MOST_CELLS, MOST_ENTRIES // max(pipelines, 1)))
        return _cells(workers, min(workers, most))

    @cached_property
    def bounds(self) -> np.ndarray:
        """int64 [count + 1]: the workers of cell c are ``bounds[c]`` to ``bounds[c + 1]``."""
        return np.arange(self.count + 1) * self.workers // self.count

    @cached_property
    def sizes(self) -> np.ndarray:
        """Workers of each, float64 [count]."""
        return np.diff(self.bounds).astype(float)

    @property
    def per_cell(self) -> float:
        """Workers that one stands for."""
        return self.workers / self.count

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many cells a rollout may have, descending: all, half of them, and so on."""
        counts = [self.count]
        while counts[-1] > 1:
            counts.append((counts[-1] + 1) // 2)
        return tuple(counts)

    def of(self, workers: np.ndarray) -> np.ndarray:
        """The cell of each worker."""
        return np.searchsorted(self.bounds, workers, side="right") - 1

    def members(self, first: int, count: int) -> tuple[int, ...]:
        """The workers of ``count`` cells from ``first`` on."""
        return tuple(range(int(self.bounds[first]), int(self.bounds[first + count])))

    def range_of(self, workers: Collection[int]) -> tuple[int, int] | None:
        """(first, count) of the cells that have exactly these workers, all different; None if there are none."""
        if not workers:
            return None
        lowest, highest, bounds = min(workers), max(workers), self._bounds
        first, behind = bisect_left(bounds, lowest), bisect_left(bounds, highest + 1)
        whole = (bounds[first], bounds[behind]) == (lowest, highest + 1) and len(workers) == highest + 1 - lowest
        return (first, behind - first) if whole else None

    @cached_property
    def _bounds(self) -> list[int]:
        """With an end that nobody reaches."""
        return [*self.bounds.tolist(), sys.maxsize]


@cache
def _cells(workers: int, count: int) -> Cells:
    return Cells(workers, count)


@dataclass(frozen=True)
class Draft:
    """The samples of a step by request, thinned out so that one worker of each cell has its due.

    ``left``, ``context`` and ``admit_s`` [n] as in :class:`Sequences`; request r is ``first[r]`` to ``first[r + 1]``.
    ``cells``: how many there are.
    """

    left: np.ndarray
    context: np.ndarray
    admit_s: np.ndarray
    first: np.ndarray
    cells: int

    @classmethod
    def of(cls, shape: StepShape, table: CostTable, cells: Cells) -> Draft:
        """Samples of one prompt are side by side; they are split as ``runtime/step.py`` splits them.

        Where a cell stands for many workers, every so-many-th request is kept in the order of their longest samples,
        the longest of all among them.
        """
        n = len(shape.lengths)
        first = np.append(np.arange(0, n, _request_size(shape, cells.workers)), n)
        if n == 0:
            nothing = np.zeros(0, np.int64)
            return cls(nothing, nothing, np.zeros(0), np.zeros(1, np.int64), cells.count)
        if cells.workers > cells.count:
            tallest = np.argsort(-np.maximum.reduceat(shape.lengths, first[:-1]), kind="stable")
            kept = max(1, round(len(tallest) / cells.per_cell))
            at = ((np.arange(kept) + 0.5) * len(tallest) / kept).astype(np.int64)
            at[0] = 0
            requests = tallest[at]
            sizes = np.diff(first)[requests]
            index = np.concatenate([np.arange(first[r], first[r + 1]) for r in requests.tolist()])
            first = np.append(0, np.cumsum(sizes))
        else:
            index = np.arange(n)
        share = shape.prefill_tokens / max(int(shape.prompts.sum()), 1)
        admit_s = shape.prompts[index] * (share * table.prefill[1].token_s)
        return cls(np.maximum(shape.lengths[index], 1), shape.prompts[index], admit_s, first, cells.count)

    @cached_property
    def _requests(self) -> tuple[np.ndarray, np.ndarray]:
        """(in which order they are dealt out, tokens of each)."""
        tokens = np.add.reduceat(self.left, self.first[:-1])
        return np.argsort(-tokens, kind="stable"), tokens

    def on(self, count: int) -> Sequences:
        """Dealt out to ``count`` cells by tokens: the request with most tokens first, each to the one with fewest."""
        if len(self.left) == 0:
            return Sequences(self.left, self.context, self.admit_s, np.zeros(count + 1, np.int64))
        at, bounds = _deal(*self._requests, self.first, count)
        return Sequences(self.left[at], self.context[at], self.admit_s[at], bounds)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _deal(order, tokens, first, count):
    """(the samples by cell, int64 [n]; where those of each cell begin, int64 [count + 1])."""
    load, to = np.zeros(count), np.empty(len(order), np.int64)
    bounds, at = np.zeros(count + 1, np.int64), np.empty(first[-1], np.int64)
    for r in order:
        best = 0
        for c in range(1, count):
            if load[c] < load[best]:
                best = c
        to[r] = best
        load[best] += tokens[r]
        bounds[best + 1] += first[r + 1] - first[r]
    for c in range(count):
        bounds[c + 1] += bounds[c]
    place = bounds[:-1].copy()
    for r in order:
        for i in range(first[r], first[r + 1]):
            at[place[to[r]]] = i
            place[to[r]] += 1
    return at, bounds


@numba.njit(cache=True, nogil=True, error_model="numpy")
def least(wanted, own, count):
    """The first of ``count`` cells of which least is ``wanted`` [C]; of equals, that with most of its ``own`` [C]."""
    best, best_wanted, best_own = 0, np.inf, 0.0
    for first in range(len(wanted) - count + 1):
        there, here = 0.0, 0.0
        for c in range(first, first + count):
            there += wanted[c]
            here += own[c]
        if there < best_wanted - 1e-9 or (there < best_wanted + 1e-9 and here > best_own):
            best, best_wanted, best_own = first, there, here
    return best


def warm_up() -> None:
    """Compile the kernels, or load them."""
    least(np.ones(1), np.ones(1), 1)
    one = np.ones(1, np.int64)
    _deal(one - 1, one, np.array([0, 1]), 1)


def _request_size(shape: StepShape, workers: int) -> int:
    """Samples of a request: those of a prompt, or parts of them where there are fewer prompts than workers."""
    group = max(1, round(int(shape.prompts.sum()) / max(shape.prefill_tokens, 1)))
    prompts = max(1, len(shape.lengths) // group)
    parts = min(group, max(1, -(-workers // prompts)))
    return -(-group // parts)
