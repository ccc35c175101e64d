"""Sums that have the same bits in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.thread_ranks import World
from longtail.engine.comm import LocalCommunicator
from longtail.rl import exact
from longtail.rl.optim import shard_bounds

SIZE = 2 * exact.BLOCK + 96
FLOATS = [torch.float32, torch.float64, torch.bfloat16]


def gradients(seed: int, count: int, size: int = SIZE, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of all magnitudes from far below the grid to a few units: together within the exact range."""
    rng = np.random.default_rng(seed)
    scales = 2.0 ** rng.integers(-60, 2, (count, size))
    return [torch.from_numpy(values).to(dtype) for values in rng.normal(size=(count, size)) * scales]


def summed(addends: list[torch.Tensor], size: int = SIZE) -> torch.Tensor:
    sums = torch.zeros(size, dtype=torch.float64)
    for addend in addends:
        exact.add(sums, addend)
    return sums


@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), ranks=st.integers(1, 4))
def test_any_order_on_any_ranks_gives_the_same_bits(data, seed, count, ranks):
    addends = gradients(seed, count)
    expected = summed(addends)
    order = data.draw(st.permutations(range(count)))
    dealt = data.draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    shares = [summed([addends[i] for i in order if dealt[i] == rank]) for rank in range(ranks)]
    bounds = shard_bounds(SIZE, ranks)
    world = World(ranks)

    def work(rank: int) -> float:
        comm = world.comm(range(ranks), rank)
        exact.reduce_shards(comm, shares[rank], bounds)
        return exact.global_norm(comm, shares[rank][slice(*bounds[rank])])

    norms = world.run(work)
    together = torch.cat([share[slice(*part)] for share, part in zip(shares, bounds, strict=True)])
    assert torch.equal(together, expected)
    assert set(norms) == {exact.global_norm(LocalCommunicator(), expected)}


def test_plain_addition_would_not_give_the_same_bits():
    addends = gradients(0, 12)
    orders = addends, addends[::-1]
    assert not torch.equal(*(torch.stack([a.double() for a in order]).cumsum(0)[-1] for order in orders))
    assert torch.equal(*(summed(order) for order in orders))


@pytest.mark.parametrize("piece", [4096, 1000, 7])
def test_shards_that_come_in_pieces_are_added_up_whole(piece, monkeypatch):
    monkeypatch.setattr(exact, "PIECE", piece)
    size, ranks = exact.BLOCK + 64, 3  # the last rank has no shard
    addends, bounds = gradients(1, ranks, size), shard_bounds(exact.BLOCK + 64, ranks)
    shares, world = [summed([addend], size) for addend in addends], World(ranks)
    world.run(lambda rank: exact.reduce_shards(world.comm(range(ranks), rank), shares[rank], bounds))
    together = torch.cat([share[slice(*part)] for share, part in zip(shares, bounds, strict=True)])
    assert torch.equal(together, summed(addends, size))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_addend_changes_by_half_the_grid_at_most(dtype):
    (addend,) = gradients(2, 1, dtype=dtype)
    sums = summed([addend])
    assert (sums - addend.double()).abs().max() <= exact.GRID / 2
    assert torch.equal(sums / exact.GRID, (sums / exact.GRID).round())


def test_a_float32_gradient_that_is_not_tiny_is_added_as_it_is():
    (addend,) = gradients(3, 1)
    large = addend[addend.abs() >= 2.0**-22]
    assert len(large) > SIZE // 10
    assert torch.equal(summed([large], len(large)), large.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_beyond_the_exact_range_sums_are_still_right(dtype):
    addends = [a * 1e12 for a in gradients(4, 9, dtype=dtype)]
    columns = torch.stack(addends).double().t().tolist()
    right = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
    sizes = torch.tensor([math.fsum(map(abs, column)) for column in columns], dtype=torch.float64)
    error = (summed(addends) - right).abs()
    assert (error <= len(addends) * (sizes * 2.0**-52 + exact.GRID)).all()


def test_up_to_the_edge_of_the_exact_range_no_addition_rounds():
    near = torch.full((SIZE,), exact.EXACT / 2)
    small = torch.full((SIZE,), 3 * exact.GRID)
    assert torch.equal(summed([near, small, near - 1, small]), summed([small, small, near - 1, near]))
    assert summed([near, near - 1, small])[0] == exact.EXACT - 1 + 3 * exact.GRID


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(value, dtype):
    addend = torch.zeros(SIZE, dtype=dtype)
    addend[SIZE - 1] = value
    sums = summed([addend, *gradients(5, 2)])
    assert not sums[-1].isfinite()
    assert sums[:-1].isfinite().all()
    assert not math.isfinite(exact.global_norm(LocalCommunicator(), sums))


def test_infinities_of_both_signs_are_not_finite_together():
    both = [torch.full((SIZE,), value) for value in (math.inf, -math.inf)]
    assert summed(both).isnan().all()


def test_a_norm_too_large_for_a_float_is_infinite():
    huge = torch.full((SIZE,), 1e152, dtype=torch.float64)
    assert exact.global_norm(LocalCommunicator(), huge) == pytest.approx(1e152 * math.sqrt(SIZE))
    assert exact.global_norm(LocalCommunicator(), huge * 1e2) == math.inf


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads):
    size = 40 * exact.BLOCK + 32
    addends = gradients(6, 2, size)
    before = torch.get_num_threads()
    expected = summed(addends, size)
    squares = exact.block_squares(expected)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(summed(addends, size), expected)
        assert exact.block_squares(expected).tobytes() == squares.tobytes()
    finally:
        torch.set_num_threads(before)


def test_a_gradient_that_is_not_contiguous_is_added_in_its_own_order():
    (addend,) = gradients(7, 1, 64 * 6)
    sums = torch.zeros(6, 64, dtype=torch.float64)
    exact.add(sums, addend.view(64, 6).t())
    assert torch.equal(sums.flatten(), summed([addend.view(64, 6).t().contiguous()], 64 * 6))


def test_sizes_that_differ_are_refused():
    with pytest.raises(ValueError, match="3 elements cannot be added to 4"):
        exact.add(torch.zeros(4, dtype=torch.float64), torch.zeros(3))
    with pytest.raises(ValueError, match="no multiple of 32"):
        exact.block_squares(torch.zeros(33, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_devices_round_to_the_same_sums(dtype, monkeypatch):
    monkeypatch.setattr(exact, "PIECE", exact.BLOCK)
    addends = gradients(8, 3, dtype=dtype)
    sums = torch.zeros(SIZE, dtype=torch.float64)
    for addend in addends:
        exact._add_elementwise(sums, addend)
    assert torch.equal(sums, summed(addends))


@pytest.mark.parametrize("size", [0, 32, exact.BLOCK, SIZE])
def test_sums_of_squares_are_those_of_whole_blocks(size, monkeypatch):
    monkeypatch.setattr(exact, "PIECE", exact.BLOCK)
    values = torch.from_numpy(np.random.default_rng(9).normal(size=size))
    expected = [float((block * block).sum()) for block in values.split(exact.BLOCK)][: -(-size // exact.BLOCK)]
    np.testing.assert_allclose(exact.block_squares(values), expected, rtol=1e-13)
    np.testing.assert_allclose(exact._block_squares_elementwise(values).numpy(), expected, rtol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_narrowed_sums_are_rounded_once_and_lie_in_the_same_memory(dtype, scale):
    size = 3 * exact._ITEM + 32
    sums = summed(gradients(10, 2, size), size)
    expected = (sums * scale).to(dtype)
    narrow = exact.narrow(sums, scale, dtype)
    assert torch.equal(narrow, expected)
    assert narrow.data_ptr() == sums.data_ptr()
    assert len(exact.narrow(sums[:0], scale, dtype)) == 0
