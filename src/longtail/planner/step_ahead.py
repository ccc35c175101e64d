"""A step that is to come: what it takes alone, and its rollout on whatever workers it may begin.

That follows from the lengths that are expected and from what work costs, which are the same for many decisions, so it
is remembered from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numba
import numpy as np

from longtail.costs.table import CostTable
from longtail.planner import fluid
from longtail.planner.alone import Alone, alone_by_draft
from longtail.planner.cells import Cells, Draft
from longtail.planner.graph import LARGE, SMALL, Part, StepWork, step_work
from longtail.planner.remembered import Remembered
from longtail.planner.solo import Steps
from longtail.planner.state import StepShape
from longtail.planner.tail import Carry, rollout

MOST_REMEMBERED = 256


class Begin(NamedTuple):
    """Rollouts begin on so many ``cells`` from ``first`` on, and their tails are ``merged`` where that saves
    anything."""

    first: int
    cells: int
    merged: bool


@dataclass(eq=False)
class StepAhead:
    """A step of ``shape`` of the ``index``-th pipeline; ``kinds`` is the first of its model's kinds in the factors."""

    shape: StepShape
    costs: CostTable
    steps: Steps
    cells: Cells
    slots: int
    widen: bool
    kinds: int
    index: int
    _rows: dict[Begin, np.ndarray] = field(default_factory=dict)
    _blocks: dict[tuple[int, bool], np.ndarray] = field(default_factory=dict)
    _parts: dict[tuple[int, bool], tuple[Part, ...]] = field(default_factory=dict)
    _densities: dict[Begin, np.ndarray] = field(default_factory=dict)

    @cached_property
    def alone(self) -> Alone:
        """Seconds by stage, with all workers to itself."""
        workers = self.cells.workers
        return alone_by_draft(
            self.shape, self.costs, self.draft, self.steps, workers=workers, slots=self.slots, widen=self.widen
        )

    @cached_property
    def work(self) -> StepWork:
        """Without its rollout."""
        return step_work(self.shape, self.costs, ())

    @cached_property
    def draft(self) -> Draft:
        return Draft.of(self.shape, self.costs, self.cells)

    def parts(self, count: int, merged: bool) -> tuple[Part, ...]:
        """Its rollout on ``count`` cells; of one part where merging its tail saves nothing."""
        key = (count, merged)
        if key not in self._parts:
            carry, per_cell = Carry.of(self.costs), self.cells.per_cell
            whole, tail = rollout(self.draft.on(count), self.steps, self.slots, stands_for=per_cell, carry=carry)
            self._parts[count, False] = (whole,)
            self._parts[count, True] = tail or (whole,)
        return self._parts[key]

    def row(self, begin: Begin) -> np.ndarray:
        """[2, 3, C]: its rollout as the simulation has it."""
        row = self._rows.get(begin)
        if row is None:
            row = self._rows[begin] = as_row((), self.cells.count, self.kinds)
            row[:, :, begin.first : begin.first + begin.cells] = self._block(begin.cells, begin.merged)
        return row

    def density(self, begin: Begin) -> np.ndarray:
        """[C]: the part of a cell's time that its rollouts want, were it as fast as alone."""
        density = self._densities.get(begin)
        if density is None:
            row = self.row(begin)
            wanted_s = (row[:, fluid.SOLO] * row[:, fluid.BUSY]).sum(axis=0)
            density = self._densities[begin] = wanted_s / max(self.alone.total_s, 1e-9)
        return density

    def _block(self, count: int, merged: bool) -> np.ndarray:
        """[2, 3, count]: a row of these cells. Of pipelines that begin on the same workers, not all merge to the same
        one."""
        key = (count, merged)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = as_row(self.parts(count, merged), count, self.kinds)
            if (tail_cells := int((block[1, fluid.SOLO] > 0).sum())) and (by := self.index * tail_cells % count):
                block[1] = np.concatenate((block[1, :, -by:], block[1, :, :-by]), axis=1)
        return block


def steps_of(costs: CostTable, most: int, widest: int) -> Steps:
    """:meth:`Steps.of`, remembered."""
    return _STEPS.of((costs,), (most, widest), lambda: Steps.of(costs, most, widest))


def step_ahead(
    shape: StepShape, costs: CostTable, steps: Steps, cells: Cells, *, slots: int, widen: bool, kinds: int, index: int
) -> StepAhead:
    """A :class:`StepAhead`, remembered."""
    return _AHEAD.of(
        (shape, costs, steps),
        (cells, slots, widen, kinds, index),
        lambda: StepAhead(shape, costs, steps, cells, slots, widen, kinds, index),
    )


_STEPS = Remembered[Steps](MOST_REMEMBERED)
_AHEAD = Remembered[StepAhead](MOST_REMEMBERED)


def as_row(parts: tuple[Part, ...], count: int, kinds: int) -> np.ndarray:
    """[2, 3, count]: up to two parts of a rollout over so many cells, as the simulation has them."""
    row = np.zeros((2, 3, count))
    row[:, fluid.BUSY] = 1.0
    row[:, fluid.KIND] = kinds
    for i, part in enumerate(parts):
        _fill(row[i], *part, kinds)
    return row


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _fill(row, solo_s, busy, small_s, prefill_s, kinds):
    for c in range(len(solo_s)):
        row[0, c], row[1, c] = solo_s[c], busy[c]
        row[2, c] = kinds + (SMALL if small_s[c] > 0.5 * (solo_s[c] - prefill_s[c]) else LARGE)


def warm_up() -> None:
    """Compile the kernel, or load it."""
    one = np.ones(1)
    as_row((Part(one, one, one, one),), 1, 0)
