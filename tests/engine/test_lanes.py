from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.engine_models import tiny_config
from longtail.core.errors import CapacityError
from longtail.engine.lanes import MISSING, LanePool


def small_pool(blocks: int = 24, **options) -> LanePool:
    return LanePool(tiny_config(), blocks=blocks, block_tokens=4, **options)


def one(row: int) -> np.ndarray:
    return np.array([row])


def test_block_bytes_is_what_a_block_takes():
    pool = small_pool(dtype=torch.float64)
    taken = (pool.k.nbytes + pool.v.nbytes) / pool.total
    assert LanePool.block_bytes(pool.config, 4, torch.float64) == taken


def test_growing_takes_blocks_for_every_head_and_closing_gives_them_back():
    pool = small_pool()
    row = pool.open()
    pool.grow(row, 9)
    assert (pool.used, pool.free) == (6, 18)
    pool.grow(row, 12)
    assert pool.used == 6
    pool.close(row)
    assert pool.used == 0
    pool.check()


def test_growing_beyond_the_pool_changes_nothing():
    pool = small_pool()
    row = pool.open()
    pool.grow(row, 4)
    with pytest.raises(CapacityError, match="24 KV blocks wanted, 22 of 24 free"):
        pool.grow(row, 52)
    assert pool.used == 2
    pool.check()


def test_writing_a_shared_block_copies_it_for_the_writer_alone():
    pool = small_pool()
    source = pool.open()
    pool.grow(source, 6)
    pool.k.normal_()
    pool.v.normal_()
    fork = pool.fork(source, 6)
    assert pool.used == 4
    before = pool.tables[source, :, 1].copy()
    pool.claim(one(fork), one(6))
    assert pool.used == 6
    pool.check()
    assert (pool.tables[source, :, 1] == before).all()
    after = pool.tables[fork, :, 1]
    assert not (after == before).any()
    assert torch.equal(pool.k[after], pool.k[before])
    assert torch.equal(pool.v[after], pool.v[before])
    assert (pool.tables[fork, :, 0] == pool.tables[source, :, 0]).all()


def test_the_last_holder_of_a_block_writes_it_without_a_copy():
    pool = small_pool()
    source = pool.open()
    pool.grow(source, 6)
    rows = np.array([pool.fork(source, 6) for _ in range(3)])
    pool.close(source)
    pool.claim(rows, np.full(3, 6))
    # Two whole shared blocks of the first position, three separate ones of the second.
    assert pool.used == 2 + 3 * 2
    pool.check()


def test_a_single_lane_can_be_released_and_refilled():
    pool = small_pool()
    row = pool.open()
    pool.grow(row, 10)
    pool.release(row, 1)
    assert pool.used == 3
    pool.check()
    assert (pool.tables[row, 1] == MISSING).all()
    pool.grow(row, 10)
    assert pool.used == 6
    pool.check()


def test_a_pool_holds_only_its_kv_heads():
    pool = small_pool(kv_heads=[1])
    row = pool.open()
    pool.grow(row, 9)
    assert pool.used == 3
    assert pool.kv_heads == (1,)


def test_many_rows_and_long_lanes_outgrow_the_first_tables():
    pool = small_pool(blocks=400)
    rows = [pool.open() for _ in range(40)]
    pool.grow(rows[-1], 4 * 150)
    pool.grow(rows[0], 4)
    assert pool.used == 302
    pool.check()


def test_the_checker_finds_a_lost_and_a_doubled_block():
    pool = small_pool()
    row = pool.open()
    pool.grow(row, 8)
    pool.tables[row, 0, 0] = pool.tables[row, 1, 0]
    with pytest.raises(AssertionError, match="is named"):
        pool.check()
    pool = small_pool()
    pool.free -= 1
    with pytest.raises(AssertionError, match="are not 24"):
        pool.check()


class AnyUse(RuleBasedStateMachine):
    """Random rows that grow, fork, write, lose lanes and close."""

    def __init__(self):
        super().__init__()
        self.pool = small_pool(blocks=30)
        self.reach: dict[int, int] = {}

    @rule()
    def open(self):
        self.reach[self.pool.open()] = 0

    @precondition(lambda self: self.reach)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def grow(self, data, tokens):
        row = data.draw(st.sampled_from(sorted(self.reach)))
        try:
            self.pool.grow(row, tokens)
            self.reach[row] = max(self.reach[row], tokens)
        except CapacityError:
            assert self.pool.free < self.pool.heads * self.pool.blocks_of(tokens)

    @precondition(lambda self: any(self.reach.values()))
    @rule(data=st.data())
    def fork(self, data):
        row = data.draw(st.sampled_from(sorted(r for r, n in self.reach.items() if n)))
        tokens = data.draw(st.integers(1, self.reach[row]))
        self.reach[self.pool.fork(row, tokens)] = tokens

    @precondition(lambda self: any(self.reach.values()))
    @rule(data=st.data())
    def write(self, data):
        held = sorted(r for r, n in self.reach.items() if n)
        rows = data.draw(st.lists(st.sampled_from(held), unique=True, min_size=1))
        positions = np.array([self.reach[r] for r in rows])
        if self.pool.wanted(np.array(rows), positions) <= self.pool.free:
            self.pool.claim(np.array(rows), positions)
            assert self.pool.wanted(np.array(rows), positions) == 0
            for row in rows:
                self.reach[row] += 1

    @precondition(lambda self: self.reach)
    @rule(data=st.data())
    def close(self, data):
        row = data.draw(st.sampled_from(sorted(self.reach)))
        self.pool.close(row)
        del self.reach[row]

    @precondition(lambda self: self.reach)
    @rule(data=st.data(), head=st.integers(0, 1))
    def release(self, data, head):
        row = data.draw(st.sampled_from(sorted(self.reach)))
        self.pool.release(row, head)
        self.reach[row] = 0

    @invariant()
    def conserved(self):
        self.pool.check()


TestAnyUseConservesLanes = AnyUse.TestCase
TestAnyUseConservesLanes.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
