"""The groups that there may be: neighbours, nested, and the same heads as the engine gives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.core.types import Layout
from longtail.engine.shard import head_bounds
from longtail.planner.tree import Tree, halves, head_ranges, possible_degrees


def nodes(group):
    yield group
    if len(group) > 1:
        for half in halves(group):
            yield from nodes(half)


def test_the_first_half_takes_the_larger_part():
    assert halves((4, 5, 6)) == ((4, 5), (6,))


@given(heads=st.integers(1, 64), data=st.data())
def test_ranks_hold_the_heads_that_the_engine_gives_them(heads, data):
    ranks = data.draw(st.integers(1, heads))
    assert [(held.start, held.stop) for held in head_ranges(heads, ranks)] == head_bounds(heads, ranks)


@given(workers=st.integers(1, 70), most=st.integers(1, 12), degree=st.integers(1, 12))
def test_a_layout_has_every_worker_once_in_groups_of_neighbours(workers, most, degree):
    tree = Tree.over(range(workers), possible_degrees(workers, most))
    groups = tree.layout(degree).groups
    assert [worker for group in groups for worker in group] == list(range(workers))
    assert all(len(group) <= degree and tree.may_be(group) for group in groups)
    assert tree.has(groups)


@given(workers=st.integers(1, 70), most=st.integers(1, 12))
def test_every_node_of_a_block_has_a_possible_degree(workers, most):
    degrees = possible_degrees(workers, most)
    assert max(degrees) <= max(most, 1)
    tree = Tree.over(range(workers), degrees)
    assert all(len(node) in degrees for node in nodes(tree.blocks[0]))


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_powers_of_two_make_the_layouts_that_a_fixed_degree_makes(degree):
    assert Tree.over(range(16), (1, 2, 4, 8)).layout(degree) == Layout.uniform(16, degree)


def test_ranges_that_are_no_halves_of_halves_are_no_groups():
    tree = Tree.over(range(4), (1, 2, 4))
    assert tree.has([(0, 1), (2,), (3,)])
    assert not tree.has([(1, 2)])
    assert not tree.has([(5,)])
