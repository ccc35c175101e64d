"""What is remembered from one decision to the next changes none of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from longtail.costs.table import CostTable
from longtail.planner.cells import Cells, least
from longtail.planner.lookahead import share
from longtail.planner.remembered import Remembered
from longtail.planner.state import ClusterState, PipelineState, Stage
from planner.clusters import cluster, costs, live, long_tailed, pipeline, shape


def test_it_is_worked_out_once_for_the_same_objects() -> None:
    made: list[str] = []
    remembered = Remembered[str](2)
    one, like_it = ["a"], ["a"]

    def of(parts: list[str], value: int) -> str:
        def make() -> str:
            made.append(f"{parts} {value}")
            return made[-1]

        return remembered.of((parts,), (value,), make)

    assert of(one, 1) is of(one, 1)
    assert len(made) == 1
    of(like_it, 1)  # equal, but another object
    of(one, 2)  # and now the first is forgotten
    assert len(made) == 3
    of(one, 1)
    assert len(made) == 4


def state(table: CostTable, *, seed: int) -> ClusterState:
    def one(name: str, n: int) -> PipelineState:
        rollout = live(np.arange(n) % 4, np.arange(n) * 7 + 1)
        return pipeline(
            name, shape(long_tailed(n, seed=seed)), stage=Stage.ROLLOUT, rollout=rollout, workers=range(4), table=table
        )

    return cluster(4, one("a", 16), one("b", 24 + seed))


def test_a_decision_is_the_same_after_any_others() -> None:
    table = costs()
    first = share(state(table, seed=0), clock=lambda: 0.0)
    for seed in range(1, 4):
        share(state(table, seed=seed), clock=lambda: 0.0)
    assert share(state(table, seed=0), clock=lambda: 0.0) == first
    assert share(state(costs(), seed=0), clock=lambda: 0.0) == first


def test_costs_that_have_changed_are_taken_as_they_are_now() -> None:
    table = costs()
    now = state(table, seed=0)
    before = share(now, clock=lambda: 0.0)
    slow = replace(table, train_token_s=0.5)
    changed = replace(now, pipelines=tuple(replace(p, costs=slow) for p in now.pipelines))
    fresh = share(state(replace(costs(), train_token_s=0.5), seed=0), clock=lambda: 0.0)
    assert share(changed, clock=lambda: 0.0) == fresh != before


@pytest.mark.parametrize("workers", [2, 16, 100])
def test_cells_are_found_by_their_workers(workers: int) -> None:
    cells = Cells.over(workers, 2)
    for first in range(cells.count):
        for count in range(1, cells.count - first + 1):
            assert cells.range_of(cells.members(first, count)) == (first, count)
    assert cells.range_of(()) is None
    assert cells.range_of((0, workers - 1)) == ((0, 2) if workers == 2 else None)
    assert cells.range_of((workers,)) is None
    if workers == 100:
        assert cells.range_of(range(1, 7)) is None


def test_the_least_wanted_cells_are_taken_and_of_equals_ones_own() -> None:
    assert least(np.array([3.0, 1.0, 2.0, 2.0]), np.zeros(4), 1) == 1
    assert least(np.array([3.0, 1.0, 2.0, 2.0]), np.zeros(4), 2) == 1
    assert least(np.ones(4), np.array([0.0, 0.0, 1.0, 0.0]), 1) == 2
    assert least(np.ones(4), np.zeros(4), 2) == 0
