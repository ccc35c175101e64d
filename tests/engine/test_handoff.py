"""Sequences change hands in mid-generation, and no bit of what they say changes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import assert_same, make_engine, prompt_of, random_model, request, run_all
from engine.thread_ranks import FREE_TO_MOVE, Switch, ThreadComm, World, rollout
from longtail.core.errors import CapacityError, Diverged, PeerLost
from longtail.core.types import Request
from longtail.engine.berths import Way
from longtail.engine.blocks import BlockStore
from longtail.engine.cargo import Cargo
from longtail.engine.engine import Engine
from longtail.engine.handoff import carry_out
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder
from longtail.engine.shm import ShmCommunicator
from longtail.engine.switch_plan import How, Refusal, SwitchCosts, SwitchPlan, plan_switch

UNEVEN = {"family": "llama", "qk_norm": False, "heads": 9, "kv_heads": 3}
FOUR = {"heads": 8, "kv_heads": 4}

NARROW, WIDE = ((0,), (1,)), ((0, 1),)
ALONE4, PAIRS, ALL4 = ((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)

Load = tuple[str, int, int]
"""A prefix of request ids, how many requests, and a seed."""
TWO: tuple[Load, ...] = (("a", 3, 0), ("b", 2, 10))
THREE: tuple[Load, ...] = (("a", 2, 0), ("b", 1, 10), ("c", 2, 20))
FOUR_LOADS: tuple[Load, ...] = (("a", 2, 0), ("b", 1, 10), ("c", 0, 0), ("d", 2, 30))
LENGTHS = (5, 12, 2, 9)
STEPS = range(13)
"""Of engines that decode for 12 steps at most after one prefill."""


def batch(load: Load) -> list[Request]:
    """Groups of 2, 3 and 1 samples that share a prompt ending within a block, and end after various steps."""
    prefix, count, seed = load
    return [
        request(
            f"{prefix}{i}",
            prompt_of(9 + 14 * i, seed=seed + i),
            samples=1 + (i + 1) % 3,
            seed=seed + i,
            forced=tuple(LENGTHS[(i + j) % 4] for j in range(1 + (i + 1) % 3)),
        )
        for i in range(count)
    ]


@functools.cache
def model_of(dtype: torch.dtype = torch.float64, **shape) -> Decoder:
    model = random_model(dtype, layers=1, **shape)
    model.rope.upto(model.config.max_context)  # one table for all threads
    return model


@functools.cache
def alone(model: Decoder, loads: tuple[Load, ...]):
    return run_all(make_engine(model), [item for load in loads for item in batch(load)])


def changes_nothing(model: Decoder, loads, switches, **options):
    outcome = rollout(model, [batch(load) for load in loads], switches, **options)
    assert_same(alone(model, tuple(loads)), outcome.done, 0)
    return outcome


# Every step, every direction


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
@pytest.mark.parametrize("shape", [{}, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_widening_at_any_step_changes_no_bit(dtype, shape, how):
    for step in STEPS:
        changes_nothing(model_of(dtype, **shape), TWO, [Switch(step, WIDE, how)])


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
def test_narrowing_at_any_step_changes_no_bit(how):
    for step in STEPS:
        changes_nothing(model_of(**UNEVEN), TWO, [Switch(2, WIDE), Switch(step, NARROW, how)])


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
def test_migration_at_any_step_changes_no_bit(how):
    for step in STEPS:
        changes_nothing(model_of(), TWO, [Switch(step, ((0,),), how)])


@pytest.mark.parametrize("step", [1, 2, 4])
@pytest.mark.parametrize(
    "layouts", [(PAIRS, ALL4, PAIRS, ALONE4), (ALL4, ALONE4), (ALL4, PAIRS), (PAIRS, ALONE4, ((0,), (2, 3)))]
)
def test_one_two_four_and_back_changes_no_bit(layouts, step):
    changes_nothing(model_of(**FOUR), FOUR_LOADS, [Switch(step, groups) for groups in layouts])


def test_three_heads_on_three_ranks_and_back_change_no_bit():
    model = model_of(**UNEVEN)
    changes_nothing(model, FOUR_LOADS[:3], [Switch(2, ((0, 1, 2),)), Switch(3, ((0,), (1, 2))), Switch(2, ALONE4[:3])])


def test_a_replica_without_work_joins_and_helps():
    outcome = changes_nothing(model_of(), [TWO[0], ("none", 0, 0)], [Switch(3, WIDE)])
    assert [rank.steps for rank in outcome.ranks] == [12, 9]


def test_a_switch_without_anything_in_flight_is_possible():
    nothing = [("none", 0, 0)] * 2
    assert changes_nothing(model_of(), nothing, [Switch(0, WIDE), Switch(0, NARROW)]).done == {}


def test_going_on_as_before_copies_nothing():
    outcome = changes_nothing(model_of(), TWO, [Switch(3, NARROW, How.RECOMPUTE)])
    [plan] = outcome.plans
    assert {fate.way for fate in plan.fates} == {Way.STAYED}
    assert (plan.moved_bytes, plan.recomputed_tokens) == (0, 0)


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
def test_switching_over_shared_memory_changes_no_bit(how, tmp_path):
    def connect(ranks: tuple[int, ...], rank: int) -> ShmCommunicator:
        return ShmCommunicator(tmp_path / "-".join(map(str, ranks)), rank=rank, size=len(ranks))

    switches = [Switch(2, WIDE, how), Switch(2, NARROW, how), Switch(3, WIDE, how)]
    changes_nothing(model_of(torch.float32, **UNEVEN), TWO, switches, connect=connect)


# On fewer ranks, and on more


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_merging_three_ranks_into_one_at_any_step_changes_no_bit(how, last):
    for step in STEPS:
        outcome = changes_nothing(model_of(), THREE, [Switch(step, ((last,),), how)])
        assert all(outcome.ranks[r].engine.lanes.used == 0 for r in range(3))


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
def test_spreading_over_two_ranks_at_any_step_changes_no_bit(how):
    for step in STEPS:
        changes_nothing(model_of(), [TWO[0], ("none", 0, 0)], [Switch(step, NARROW, how, rebalance=True)])


@pytest.mark.parametrize("how", [How.MOVE, How.RECOMPUTE])
@pytest.mark.parametrize("between", [0, 1, 3])
def test_merging_and_spreading_again_changes_no_bit(how, between):
    for step in range(1, 8):
        switches = [Switch(step, ((1,),), how), Switch(between, ALONE4[:3], how, rebalance=True)]
        changes_nothing(model_of(**UNEVEN), THREE, switches)


def test_after_a_spread_both_ranks_work():
    item = request("a", prompt_of(30), samples=4, forced=(20,) * 4)
    base = run_all(make_engine(model_of()), [item])
    outcome = rollout(model_of(), [[item], []], [Switch(4, NARROW, rebalance=True)])
    assert_same(base, outcome.done, 0)
    [plan] = outcome.plans
    assert [len(berth.groups[0].samples) for berth in plan.berths] == [2, 2]
    assert [fate.way for fate in plan.fates].count(Way.STAYED) == 2
    assert outcome.ranks[1].done.keys() | outcome.ranks[0].done.keys() == base.keys()
    assert len(outcome.ranks[1].done) == 2


def test_a_merge_that_would_run_too_many_lets_the_youngest_wait():
    loads = [[request(f"{name}{i}", prompt_of(10), seed=i, forced=(20,)) for i in range(3)] for name in "ab"]
    base = run_all(make_engine(model_of()), loads[0] + loads[1])
    outcome = rollout(model_of(), loads, [Switch(5, ((0,),))], max_running=4)
    assert_same(base, outcome.done, 0)
    ways = [fate.way for fate in outcome.plans[0].fates]
    assert (ways.count(Way.STAYED), ways.count(Way.MOVED), ways.count(Way.RECOMPUTED)) == (2, 2, 2)


def test_a_merge_into_too_few_lanes_computes_some_again():
    loads = [[request(f"{name}{i}", prompt_of(30), seed=i, forced=(20,)) for i in range(3)] for name in "ab"]
    base = run_all(make_engine(model_of()), loads[0] + loads[1])
    outcome = rollout(model_of(), loads, [Switch(5, ((0,),))], blocks=[26, 24])
    assert_same(base, outcome.done, 0)
    ways = [fate.way for fate in outcome.plans[0].fates]
    assert ways.count(Way.STAYED) == 3
    assert ways.count(Way.RECOMPUTED) > 0


# What is in flight


def one_rank(model: Decoder, *, blocks: int = 600, **options) -> Engine:
    store = BlockStore(model.config, blocks=blocks, dtype=model.dtype)
    return Engine(model, LanePool.over(store, range(model.config.kv_heads)), **options)


def plan_between(
    engines: list[Engine], source, target, how: How = How.MOVE, costs: SwitchCosts = FREE_TO_MOVE
) -> SwitchPlan | Refusal:
    return plan_switch([engine.export() for engine in engines], source, target, costs=costs, how=how)


def stepped(engine: Engine, items: list[Request], steps: int) -> Engine:
    for item in items:
        engine.add(item)
    for _ in range(steps):
        engine.step()
    return engine


def test_exporting_changes_nothing():
    model, items = model_of(), batch(TWO[0])
    engine, done = one_rank(model, blocks=20), {}
    for item in items:
        engine.add(item)
    while engine.has_work:
        engine.export()
        done.update({(c.request_id, c.sample): c for c in engine.step().completions})
    assert_same(alone(model, TWO[:1]), done, 0)


def test_a_half_done_prompt_counts_as_not_begun():
    engine = stepped(one_rank(model_of(), chunk_tokens=16), [request("a", prompt_of(40), samples=2)], 2)
    cargo = engine.export()
    assert [group.fresh for group in cargo.groups] == [True]
    assert len(cargo.columns) == 0


def test_samples_of_a_prompt_list_its_columns_together():
    engine = stepped(one_rank(model_of()), [request("a", prompt_of(40), samples=3)], 3)
    [group] = engine.export().groups
    lanes = np.stack([sample.lanes for sample in group.samples])
    assert (lanes[:, :2] == lanes[0, :2]).all()
    assert len(np.unique(lanes)) == 2 + 3


def test_a_prompt_kept_for_samples_that_wait_goes_along():
    item = request("a", prompt_of(40), samples=3, forced=(9, 9, 9))
    base = run_all(make_engine(model_of()), [item])
    for steps in (1, 2, 6):
        outcome = rollout(model_of(), [[item], []], [Switch(steps, WIDE)], max_running=2)
        assert_same(base, outcome.done, 0)
        [plan] = outcome.plans
        [group] = plan.berths[0].groups
        assert group.prompt is not None
        assert plan.recomputed_tokens == 0
        # Two whole blocks are shared; the prompt, and whoever has written, has a last block of its own.
        assert len(plan.berths[0].origin) == 2 + (1 if steps == 1 else 3)


def test_samples_that_start_again_from_a_kept_prompt_do_not_share_its_last_block():
    items = [request("a", prompt_of(15), samples=4, forced=(20,) * 4)]
    base = run_all(make_engine(model_of()), items)
    # One free block on the other rank holds the prompt, and no sample that has gone beyond it.
    outcome = rollout(model_of(), [items, []], [Switch(6, WIDE)], blocks=[40, 3], max_running=3)
    assert_same(base, outcome.done, 0)
    [group] = outcome.plans[0].berths[0].groups
    assert group.prompt is not None
    assert [sample.lanes is None for sample in group.samples] == [False, True, True, True]


def test_a_kept_prompt_stays_behind_where_nobody_waits():
    item = request("a", prompt_of(40), samples=3, forced=(9, 9, 9))
    engines = [stepped(one_rank(model_of(), max_running=2), [item], 3), one_rank(model_of(), max_running=2)]
    plan = plan_between(engines, NARROW, ((0,),))
    assert plan.berths[0].groups[0].prompt is not None
    alone_in_two = [group for berth in dealt_out(item, 3).berths for group in berth.groups]
    waits = [any(sample.lanes is None for sample in group.samples) for group in alone_in_two]
    assert sorted(waits) == [False, True]
    assert [group.prompt is not None for group in alone_in_two] == waits


def dealt_out(item: Request, steps: int) -> SwitchPlan:
    """How a wide group of two, which runs two samples at a time, would be narrowed."""
    cargo = stepped(one_rank(model_of(), max_running=2), [item], steps).export()
    halves = [replace(cargo, heads=(head,), columns=cargo.columns[:, head : head + 1]) for head in (0, 1)]
    return plan_switch(halves, WIDE, NARROW, costs=FREE_TO_MOVE, how=How.MOVE)


@pytest.mark.parametrize("layouts", [(WIDE,), (((0,),),), (WIDE, NARROW)], ids=["widen", "migrate", "there and back"])
def test_preempted_samples_change_hands_too(layouts):
    items = [request(f"a{i}", prompt_of(20 + i), samples=2, seed=i, forced=(130, 130)) for i in range(2)]
    base = run_all(make_engine(model_of()), items)
    outcome = rollout(model_of(), [items, []], [Switch(110, groups) for groups in layouts], blocks=40)
    assert_same(base, outcome.done, 0)
    assert Way.WAITED in {fate.way for fate in outcome.plans[0].fates}
    assert sum(c.preemptions for c in outcome.done.values()) > 0


def test_stop_strings_and_end_tokens_end_a_sample_that_has_moved():
    items = [
        request(f"r{i}", prompt_of(5 + i, seed=i), samples=2, seed=i, max_tokens=30, stop=("1, 3",), end_token_ids=(7,))
        for i in range(4)
    ]
    base = run_all(make_engine(model_of(), detokenize=str), items)
    assert {c.finish for c in base.values()} == {"stop", "length"}
    outcome = rollout(model_of(), [items[:2], items[2:]], [Switch(6, WIDE), Switch(6, NARROW)], detokenize=str)
    assert_same(base, outcome.done, 0)


def test_a_request_that_was_dealt_out_comes_together_again():
    items = [request("a", prompt_of(30), samples=4, forced=(20,) * 4)]
    base = run_all(make_engine(model_of()), items)
    outcome = rollout(model_of(), [items, []], [Switch(2, WIDE), Switch(4, NARROW), Switch(4, WIDE)])
    assert_same(base, outcome.done, 0)
    narrow, wide = outcome.plans[1:]
    assert sorted(len(berth.groups[0].samples) for berth in narrow.berths) == [2, 2]
    [group] = wide.berths[0].groups
    assert [sample.sample for sample in group.samples] == [0, 1, 2, 3]


def test_a_request_that_has_moved_can_be_aborted():
    model = model_of()
    giver, receiver = stepped(one_rank(model), batch(TWO[0]), 3), one_rank(model)
    following = migrate(giver, receiver, model)
    for request_id in following.request_ids:
        following.abort(request_id)
    assert following.lanes.used == 0
    following.lanes.store.check()


def migrate(giver: Engine, receiver: Engine, model: Decoder) -> Engine:
    """All that ``giver`` has goes to the place of ``receiver``."""
    plan = plan_between([giver, receiver], NARROW, ((1,),))
    following = carried_out(plan, [giver, receiver], lambda lanes: Engine(model, lanes))
    assert following[0] is None
    assert not giver.has_work
    assert giver.lanes.store.free == giver.lanes.store.total
    return following[1]


def carried_out(plan: SwitchPlan, engines: list[Engine], make_engine) -> list[Engine | None]:
    world = World(len(engines))

    def work(rank: int) -> Engine | None:
        comm = world.comm(range(world.size), rank)
        return carry_out(plan, comm, engines[rank], engines[rank].export(), make_engine)

    return world.run(work)


# Bytes


def test_bytes_are_those_of_the_heads_that_move():
    block = LanePool.block_bytes(model_of(**UNEVEN).config, 16, torch.float64)
    item = request("a", prompt_of(40), samples=2, forced=(30, 30))
    engines = [stepped(one_rank(model_of(**UNEVEN)), [item], 3), one_rank(model_of(**UNEVEN))]
    plan = plan_between(engines, NARROW, WIDE)
    # Two blocks of the prompt are shared and travel once, and each sample has one of its own; one head of three goes.
    assert plan.sent_bytes == (4 * block, 0)
    assert plan.received_bytes == (0, 4 * block)
    assert [fate.travel_bytes for fate in plan.fates] == [3 * block, 1 * block]
    plan = plan_between(engines, NARROW, ((1, 0),))
    assert plan.sent_bytes == (8 * block, 0)
    plan = plan_between(engines, NARROW, WIDE, How.RECOMPUTE)
    assert plan.moved_bytes == 0
    assert plan.recomputed_tokens == 32 + 2 * 10


# What is cheaper


def two_samples() -> list[Engine]:
    """One of 40 tokens and one of 48, which share two blocks, on the first of two ranks."""
    item = request("a", prompt_of(40), samples=2, forced=(30, 30))
    return [stepped(one_rank(model_of()), [item], 9), one_rank(model_of())]


BLOCK = LanePool.block_bytes(model_of().config, 16, torch.float64)


def test_lanes_move_when_that_is_cheaper_than_computing_them_again():
    engines = two_samples()
    # In all, 2 shared and 2 blocks of one head travel, or 32 + 2 x 16 tokens are computed.
    for per_block_s, moved_bytes, recomputed in ((15.9, 4 * BLOCK, 0), (16.1, 0, 64)):
        costs = SwitchCosts(per_byte_s=per_block_s / BLOCK, per_token_s=1.0)
        plan = plan_between(engines, NARROW, WIDE, How.AUTO, costs)
        assert (plan.moved_bytes, plan.recomputed_tokens) == (moved_bytes, recomputed)


def test_what_a_switch_costs_in_any_case_counts_once():
    engines = two_samples()
    for fixed_s, moved_bytes in ((23.9, 4 * BLOCK), (24.1, 0)):
        costs = SwitchCosts(per_byte_s=10.0 / BLOCK, per_token_s=1.0, fixed_s=fixed_s)
        assert plan_between(engines, NARROW, WIDE, How.AUTO, costs).moved_bytes == moved_bytes


def test_each_sequence_goes_the_way_that_is_cheaper_for_it():
    """A sequence that has just entered its last block is computed again, one that has filled it moves."""
    items = [request("full", prompt_of(31), forced=(20,)), request("begun", prompt_of(17), forced=(20,))]
    engines = [stepped(one_rank(model_of()), items, 2), one_rank(model_of())]
    costs = SwitchCosts(per_byte_s=12.0 / BLOCK, per_token_s=1.0)
    plan = plan_between(engines, NARROW, WIDE, How.AUTO, costs)
    assert {fate.request_id: fate.way for fate in plan.fates} == {"full": Way.MOVED, "begun": Way.RECOMPUTED}
    assert plan.recomputed_tokens == 18


def test_lanes_that_are_in_place_are_kept_even_if_moving_is_dear():
    engines = two_samples()
    costs = SwitchCosts(per_byte_s=1.0, per_token_s=1e-9)
    plan = plan_between(engines, NARROW, ((0,),), How.AUTO, costs)
    assert [fate.way for fate in plan.fates] == [Way.STAYED, Way.STAYED]


# Short of lanes


def test_short_of_lanes_the_youngest_are_computed_again():
    items = [request(f"a{i}", prompt_of(30, seed=i), seed=i, forced=(20,)) for i in range(4)]
    base = run_all(make_engine(model_of()), items)
    ways = {}
    for blocks in (6, 8, 40):
        outcome = rollout(model_of(), [items, []], [Switch(5, WIDE)], blocks=[40, blocks])
        assert_same(base, outcome.done, 0)
        ways[blocks] = [fate.way for fate in outcome.plans[0].fates]
    # Each needs three blocks of one head on the other rank.
    moved, again = Way.MOVED, Way.RECOMPUTED
    assert ways == {6: [moved] * 2 + [again] * 2, 8: [moved] * 2 + [again] * 2, 40: [moved] * 4}


def test_blocks_come_in_before_any_are_given_up():
    """Two ranks that are nearly full swap halves: what finds no free block must be computed again."""
    loads = [[request(f"{name}{i}", prompt_of(30), seed=i, forced=(20,)) for i in range(3)] for name in "ab"]
    base = run_all(make_engine(model_of()), loads[0] + loads[1])
    outcome = rollout(model_of(), loads, [Switch(5, WIDE)], blocks=24)
    assert_same(base, outcome.done, 0)
    [plan] = outcome.plans
    assert [fate.way for fate in plan.fates].count(Way.MOVED) == 4
    assert plan.berths[0].columns == 24


def test_more_samples_than_may_run_wait_for_their_turn():
    loads = [[request(f"{name}{i}", prompt_of(10), seed=i, forced=(20,)) for i in range(3)] for name in "ab"]
    base = run_all(make_engine(model_of()), loads[0] + loads[1])
    outcome = rollout(model_of(), loads, [Switch(5, WIDE), Switch(3, NARROW)], max_running=4)
    assert_same(base, outcome.done, 0)
    assert [fate.way for fate in outcome.plans[0].fates].count(Way.MOVED) == 4
    assert [fate.way for fate in outcome.plans[1].fates].count(Way.WAITED) == 2


def test_a_group_has_as_many_columns_as_its_smallest_rank_can_hold():
    model = model_of(**UNEVEN)
    plan = plan_between([one_rank(model, blocks=41), one_rank(model, blocks=17)], NARROW, WIDE)
    assert plan.berths[0].columns == 17
    plan = plan_between([one_rank(model, blocks=31), one_rank(model, blocks=17)], NARROW, WIDE)
    assert plan.berths[0].columns == 15
    plan = plan_between([one_rank(model, blocks=31), one_rank(model, blocks=17)], NARROW, NARROW)
    assert [berth.columns for berth in plan.berths] == [None, None]


# Refused


def refused(loads: list[list[Request]], groups, *, blocks, steps: int = 3) -> str:
    """The reason; everything goes on as it would have without the attempt."""
    base = run_all(make_engine(model_of()), [item for load in loads for item in load])
    outcome = rollout(model_of(), loads, [Switch(steps, groups)], blocks=blocks)
    assert_same(base, outcome.done, 0)
    assert len(set(outcome.plans)) == 1
    [refusal] = outcome.plans
    assert isinstance(refusal, Refusal)
    return refusal.reason


def test_a_team_larger_than_the_kv_heads_is_refused():
    loads = [[request("a", prompt_of(9), forced=(8,))], [], []]
    assert refused(loads, ((0, 1, 2),), blocks=40) == "3 ranks cannot share 2 KV heads: each needs one at least"


def test_a_team_that_cannot_hold_a_sequence_to_its_end_is_refused():
    loads = [[request("a", prompt_of(30), samples=2, forced=(8, 60))], []]
    reason = refused(loads, WIDE, blocks=[12, 5])
    assert reason == (
        "request 'a' may grow to 89 tokens, which take 6 KV blocks of each head, and there is room for 5 on ranks 0, 1"
    )
    assert "room for 2 on rank 1" in refused(loads, ((1,),), blocks=[12, 5])


def test_what_no_engine_ever_exports_is_a_mistake_of_the_caller():
    engines = two_samples()
    with pytest.raises(ValueError, match="each of 2 ranks must be in one group"):
        plan_between(engines, ((0,),), WIDE)
    with pytest.raises(ValueError, match="a rank can go on in one group only"):
        plan_between(engines, NARROW, ((0, 1), (1,)))
    with pytest.raises(ValueError, match="not each of them once"):
        plan_between(engines, WIDE, NARROW)
    with pytest.raises(ValueError, match="samples of request 'a' are in flight twice"):
        plan_between([engines[0], engines[0]], NARROW, WIDE)


def test_ranks_of_a_group_that_disagree_are_found_out():
    cargo = two_samples()[0].export()
    halves = [replace(cargo, heads=(head,), columns=cargo.columns[:, head : head + 1]) for head in (0, 1)]
    [group] = cargo.groups
    other = replace(group, samples=tuple(replace(s, tokens=s.tokens + 1) for s in group.samples))
    halves[1] = replace(halves[1], groups=(other,))
    with pytest.raises(Diverged, match="ranks 0 and 1 of a tensor-parallel group do not have the same sequences"):
        plan_switch(halves, WIDE, NARROW, costs=FREE_TO_MOVE)


# Failures


class Unreachable(ThreadComm):
    def exchange(self, out, into):
        raise PeerLost("the other end is gone")


@pytest.mark.parametrize("failure", ["exchange", "memory", "bug"])
def test_a_switch_that_fails_leaves_every_engine_as_it_was(failure):
    model, items = model_of(), batch(TWO[0])
    engines = [stepped(one_rank(model), items[:1], 3), stepped(one_rank(model), items[1:], 3)]
    before = [(engine.lanes.used, engine.lanes.free) for engine in engines]
    in_flight = {(g.request.request_id, s.sample) for e in engines for g in e.export().groups for s in g.samples}
    plan = plan_between(engines, NARROW, WIDE)
    world, errors = World(2), {}

    def attempt(rank: int) -> None:
        def make_engine(lanes: LanePool) -> Engine:
            if rank == 1 and failure != "exchange":
                raise (CapacityError if failure == "memory" else AssertionError)("there are no buffers left")
            return Engine(model, lanes)

        comm = world.comm((0, 1), rank)
        comm.__class__ = Unreachable
        try:
            carry_out(plan, comm, engines[rank], engines[rank].export(), make_engine)
        except (PeerLost, CapacityError) as error:
            errors[rank] = type(error), str(error)

    if failure == "bug":
        with pytest.raises(AssertionError, match="no buffers"):
            world.run(attempt)
        assert errors == {0: (PeerLost, "a rank is gone")}
    else:
        world.run(attempt)
        expected = (
            (CapacityError, "there are no buffers left") if failure == "memory" else (PeerLost, "the other end is gone")
        )
        assert errors == {0: expected, 1: expected}
    done = {}
    for engine, held in zip(engines, before, strict=True):
        assert (engine.lanes.used, engine.lanes.free) == held
        engine.lanes.store.check()
        while engine.has_work:
            done.update({(c.request_id, c.sample): c for c in engine.step().completions})
            engine.lanes.store.check()
    assert_same({key: c for key, c in alone(model, TWO[:1]).items() if key in in_flight}, done, 0)


def test_only_an_empty_engine_adopts():
    engine = stepped(one_rank(model_of()), batch(TWO[0]), 2)
    with pytest.raises(RuntimeError, match="adopt"):
        engine.adopt((), np.empty((0, 2), np.int32))


# The same plan everywhere


def digest(plan: object) -> str:
    """Of all that it holds, to the last array element."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if dataclasses.is_dataclass(value):
            return {name: plain(item) for name, item in vars(value).items()}
        return str(value)

    return hashlib.sha256(repr(plain(plan)).encode()).hexdigest()


def digest_of_plans(cargos: list[Cargo]) -> str:
    costs = SwitchCosts(per_byte_s=9.0 / BLOCK, per_token_s=1.0, fixed_s=1.0)
    return digest([plan_switch(cargos, ALONE4, groups, costs=costs) for groups in (PAIRS, ALL4, ((1,), (3, 2)))])


def test_a_plan_does_not_depend_on_hashes(tmp_path):
    loads = [batch((prefix, 4, 7 * i)) for i, prefix in enumerate("abcd")]
    cargos = [stepped(one_rank(model_of(**FOUR), max_running=5), load, 4).export() for load in loads]
    (tmp_path / "cargos").write_bytes(pickle.dumps(cargos))
    code = (
        "import pathlib, pickle, sys; from engine.test_handoff import digest_of_plans; "
        "print(digest_of_plans(pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path / "cargos")]
    found = subprocess.check_output(command, env=environment, text=True)
    assert found.strip() == digest_of_plans(cargos)


def test_all_ranks_make_the_same_plan():
    outcome = changes_nothing(model_of(**FOUR), FOUR_LOADS, [Switch(2, ALL4), Switch(2, PAIRS)])
    for at in range(2):
        assert len({digest(rank.plans[at]) for rank in outcome.ranks}) == 1


# Anything


@st.composite
def any_switch(draw, layouts):
    groups = draw(st.sampled_from(layouts))
    costs = SwitchCosts(
        per_byte_s=draw(st.sampled_from([0.0, 9.0, 20.0])) / BLOCK,
        per_token_s=1.0,
        fixed_s=draw(st.sampled_from([0.0, 30.0])),
    )
    how, rebalance = draw(st.sampled_from(list(How))), draw(st.booleans())
    return Switch(draw(st.integers(0, 9)), groups, how, costs, rebalance)


@st.composite
def any_load(draw):
    items = []
    for i in range(draw(st.integers(0, 3))):
        samples = draw(st.integers(1, 3))
        length = draw(st.sampled_from([1, 15, 16, 17, 40]))
        forced = tuple(draw(st.lists(st.sampled_from([1, 2, 9, 25]), min_size=samples, max_size=samples)))
        items.append((i, length, samples, forced))
    return items


@st.composite
def any_rollout(draw, layouts):
    """Loads, switches and options of :func:`rollout` on as many ranks as the layouts have, which begin alone."""
    ranks = len(layouts[0])
    loads = [
        [
            request(f"{prefix}{i}", prompt_of(length, seed=i), samples=samples, seed=i, forced=forced)
            for i, length, samples, forced in draw(any_load())
        ]
        for prefix in "abc"[:ranks]
    ]
    options = {
        "blocks": draw(st.tuples(*[st.integers(5 * ranks, 40)] * ranks)),
        "max_running": draw(st.sampled_from([2, 4, 256])),
        "chunk_tokens": draw(st.sampled_from([16, 512])),
    }
    return loads, draw(st.lists(any_switch(layouts), max_size=4)), options


def survives(model: Decoder, case) -> None:
    loads, switches, options = case
    base = run_all(make_engine(model), [item for items in loads for item in items], check=False)
    assert_same(base, rollout(model, loads, switches, **options).done, 0)


@settings(max_examples=40, deadline=None)
@given(any_rollout([NARROW, WIDE, ((1, 0),), ((0,),), ((1,),)]))
def test_any_switches_of_two_ranks_change_no_bit_and_lose_no_lane(case):
    survives(model_of(), case)


@settings(max_examples=15, deadline=None)
@given(any_rollout([ALONE4[:3], ((0, 1, 2),), ((0, 1), (2,)), ((0,), (1, 2)), ((2, 0),), ((1,),), ((0,), (2,))]))
def test_any_switches_of_three_ranks_change_no_bit_and_lose_no_lane(case):
    survives(model_of(**UNEVEN), case)
