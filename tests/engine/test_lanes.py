from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.engine_models import Script, prompt_of, request, tiny_config
from longtail.core.errors import CapacityError
from longtail.engine.blocks import MISSING, BlockStore
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool


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
    pool.store.free -= 1
    with pytest.raises(AssertionError, match="are not 24"):
        pool.check()


def shared_store(blocks: int = 24) -> BlockStore:
    return BlockStore(tiny_config(), blocks=blocks, block_tokens=4)


def test_pools_of_one_store_take_the_same_blocks():
    store = shared_store()
    wide, narrow = LanePool.over(store, [0, 1]), LanePool.over(store, [1])
    wide.grow(wide.open(), 16)
    narrow.grow(narrow.open(), 12)
    assert (wide.used, narrow.used, store.free) == (8, 3, 13)
    assert wide.free == narrow.free == 13
    assert wide.k is narrow.k
    store.check()


def test_what_a_cap_promises_is_kept_from_all_others():
    store = shared_store(blocks=10)
    capped, open_ended = LanePool.over(store, [0, 1], 3), LanePool.over(store, [0, 1])
    assert (capped.total, capped.free, open_ended.free) == (6, 6, 4)
    capped.grow(capped.open(), 4)
    assert (capped.free, open_ended.free) == (4, 4)
    with pytest.raises(CapacityError, match="6 KV blocks wanted, 4 of 10 free"):
        open_ended.grow(open_ended.open(), 12)
    open_ended.grow(open_ended.open(), 8)
    with pytest.raises(CapacityError, match="6 KV blocks wanted, 4 of 6 free"):
        capped.grow(capped.open(), 12)
    capped.grow(capped.open(), 8)
    assert store.free == capped.free == open_ended.free == 0
    store.check()


def test_a_pool_that_leaves_gives_back_its_blocks_and_its_cap():
    store = shared_store()
    capped, other = LanePool.over(store, [0], 20), LanePool.over(store, [0])
    capped.grow(capped.open(), 30)
    assert other.free == 4
    capped.vacate()
    assert other.free == store.free == 24
    store.check()


def test_a_pool_takes_over_blocks_where_they_are_and_gets_new_ones_for_the_rest():
    store = shared_store()
    before = LanePool.over(store, [0])
    rows = [before.open()]
    before.grow(rows[0], 10)
    rows.append(before.fork(rows[0], 8))
    before.grow(rows[1], 12)
    store.k.normal_()
    after = LanePool.over(store, [0, 1], 9)
    columns = np.full((4, 2), MISSING, np.int32)
    columns[:, 0] = [*before.tables[rows[0], 0, :3], before.tables[rows[1], 0, 2]]
    kept = store.k[columns[:, 0]].clone()
    placed = after.place(columns, [np.array([0, 1, 2]), np.array([0, 1, 3])])
    assert (columns != MISSING).all()
    assert (after.used, store.free) == (8, 16)
    before.vacate()
    store.check()
    assert (after.used, after.free, store.free) == (8, 10, 16)
    assert torch.equal(store.k[after.tables[placed[0], 0, :3]], kept[:3])
    after.close(placed[0])
    assert after.used == 6
    store.check()


def test_placing_more_than_is_free_changes_nothing():
    store = shared_store(blocks=6)
    before = LanePool.over(store, [0])
    row = before.open()
    before.grow(row, 16)
    after = LanePool.over(store, [0, 1])
    columns = np.full((4, 2), MISSING, np.int32)
    columns[:, 0] = before.tables[row, 0, :4]
    with pytest.raises(CapacityError, match="8 KV blocks are to be placed, 4 of them new, and 2 of 6 are free"):
        after.place(columns, [np.arange(4)])
    assert (columns[:, 1] == MISSING).all()
    after.vacate()
    assert before.free == 2
    store.check()


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


class EqualColumns(RuleBasedStateMachine):
    """Engines over one and over two KV heads, with room for as many columns, in stores that others use too.

    Ranks of a tensor-parallel group must make the same schedule although they hold different numbers of heads.
    """

    COLUMNS = 13

    def __init__(self):
        super().__init__()
        self.stores = [shared_store(blocks=40), shared_store(blocks=60)]
        self.engines = [
            Engine(Script(30), LanePool.over(store, heads, self.COLUMNS), max_running=4, chunk_tokens=8)
            for store, heads in zip(self.stores, ([1], [0, 1]), strict=True)
        ]
        self.others = [LanePool.over(store, [0]) for store in self.stores]
        self.rows: list[list[int]] = [[], []]
        self.added = 0

    def same(self, act):
        outcomes = []
        for engine in self.engines:
            try:
                outcomes.append(act(engine))
            except CapacityError:
                outcomes.append(CapacityError)
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    @rule(length=st.integers(1, 30), samples=st.sampled_from([1, 2, 4]), limit=st.integers(1, 30))
    def add(self, length, samples, limit):
        item = request(f"r{self.added}", prompt_of(length, vocab=30), samples=samples, max_tokens=limit, temperature=0)
        self.same(lambda engine: engine.add(item))
        self.added += 1

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data):
        number = data.draw(st.integers(0, self.added - 1))
        self.same(lambda engine: engine.abort(f"r{number}"))

    @rule(count=st.integers(1, 20))
    def step(self, count):
        for _ in range(count):
            if self.engines[0].has_work:
                one, two = (engine.step() for engine in self.engines)
                assert (one.substage, one.tokens, one.batch, one.emitted) == (
                    two.substage,
                    two.tokens,
                    two.batch,
                    two.emitted,
                )

    @rule(which=st.integers(0, 1), tokens=st.integers(1, 60))
    def others_grow(self, which, tokens):
        pool = self.others[which]
        tokens = min(tokens, pool.free * pool.block_tokens)
        if tokens:
            self.rows[which].append(pool.open())
            pool.grow(self.rows[which][-1], tokens)

    @precondition(lambda self: any(self.rows))
    @rule(data=st.data())
    def others_close(self, data):
        which = data.draw(st.sampled_from([i for i in (0, 1) if self.rows[i]]))
        self.others[which].close(self.rows[which].pop())

    @invariant()
    def alike(self):
        one, two = self.engines
        assert one.lanes.free * 2 == two.lanes.free
        assert one.lanes.used * 2 == two.lanes.used
        for ask in ("has_work", "running", "waiting", "preemptions", "recomputed_tokens", "request_ids"):
            assert getattr(one, ask) == getattr(two, ask)
        assert not one.has_work or one.next_substage() == two.next_substage()
        for store in self.stores:
            store.check()


TestEqualColumnsDecideAlike = EqualColumns.TestCase
TestEqualColumnsDecideAlike.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
