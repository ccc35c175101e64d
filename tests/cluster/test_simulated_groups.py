"""Simulated tensor-parallel groups go by the rules of real ones, whatever comes, and whoever dies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from longtail.cluster.messages import (
    Alive,
    ClosePipeline,
    DropWork,
    LeaseBroken,
    Profile,
    Profiled,
    Sampled,
    Save,
    Saved,
    Stop,
    Stopped,
    Switched,
    Updated,
)
from longtail.costs.table import SwitchCosts
from longtail.costs.table_file import from_plain
from simulated_driven import COSTS, NARROW, PAIR, SINGLE, TWO, Driven, config, some_requests

# Commands to a group


def grouped(**options) -> Driven:
    """Workers 0 and 1 of three sample together."""
    driven = Driven(3, **options)
    driven.switch([(0,), (1,)], TWO)
    driven.generate(0, *some_requests((500,)))
    driven.until(1.0)
    assert len(driven.all(Switched)) == 2
    return driven


def test_a_followers_commands_wait_until_the_group_is_dissolved(tmp_path):
    driven = grouped()
    driven.send([1], Save(**driven.of("p"), step=0, folder=str(tmp_path), source=""))
    driven.generate(1, *some_requests((3,), first=5))
    assert not any(isinstance(r, Saved | Sampled) for r in driven.until(2.0))
    driven.switch(TWO, ((0,), (1,)))
    news = driven.run()
    assert [type(r) for r in news if r.worker == 1 and isinstance(r, Switched | Saved)] == [Switched, Saved]
    assert set(driven.ends()) == {("r0", 0), ("r5", 0)}


@pytest.mark.parametrize("what", ["drop", "close", "open", "connect", "stop"])
def test_what_ends_a_groups_work_finds_it_dissolved_on_all_members(what):
    driven = grouped()
    match what:
        case "drop":
            driven.attempts["p"] += 1
            driven.send(driven.everyone, DropWork(**driven.of("p")))
        case "close":
            driven.send(driven.everyone, ClosePipeline(**driven.of("p")))
        case "open":
            driven.open("p")
        case "connect":
            driven.connect()
        case "stop":
            driven.send(driven.everyone, Stop())
    driven.until(2.0)
    assert not driven.ends()
    assert not driven.all(LeaseBroken)
    if what == "stop":
        assert {r.worker for r in driven.all(Stopped)} == {0, 1, 2}
        return
    if what == "close":
        driven.open("p")
    driven.generate(1, *some_requests((3,), first=7))
    driven.update()
    driven.run()
    assert set(driven.ends()) == {("r7", 0)}, "what the group had is forgotten"
    assert {r.worker for r in driven.all(Updated)} == {0, 1, 2}


def test_generate_to_a_leader_joins_the_group_with_the_step_under_way():
    driven = Driven(2)
    driven.switch(SINGLE, TWO)
    driven.generate(0, *some_requests((21,), prompt=1))
    start = COSTS.switch.handshake_s + PAIR.per_prompt_token_s
    driven.until(start + PAIR.steps_s(4, 1, 2) + 0.001)
    driven.generate(0, *some_requests((2,), prompt=1, first=1))
    driven.run()
    second = start + PAIR.steps_s(5, 1, 2) + PAIR.per_prompt_token_s + PAIR.step_s(2, 7 + 2)
    assert driven.ends()["r1", 0] == pytest.approx(second)
    assert driven.ends()["r0", 0] == pytest.approx(second + PAIR.steps_s(14, 1, 8))


# Losses


@pytest.mark.parametrize("dies", [0, 1])
def test_a_member_that_dies_breaks_the_group_for_the_others_at_once(dies):
    driven = grouped()
    driven.cluster.kill(dies)
    driven.until(driven.now + 0.1)
    (broken,) = driven.all(LeaseBroken)
    assert (broken.worker, broken.lease_id) == (1 - dies, 1)
    assert broken.error == f"worker {dies} is gone"
    driven.generate(1 - dies, *some_requests((3,), first=7))
    driven.until(20.0)
    assert not driven.ends(), "nothing is sampled until the pipeline is opened again"
    driven.cluster.restart(dies)
    driven.connect()
    driven.open("p")
    driven.generate(1 - dies, *some_requests((3,), first=8))
    driven.switch([(0,), (1,), (2,)], ((0, 1), (2,)))
    driven.run()
    assert set(driven.ends()) == {("r8", 0)}
    assert {r.worker for r in driven.all(Switched) if r.attempt == 2} == {0, 1, 2}


@pytest.mark.parametrize("after_s", [0.001, 0.0125, 0.05])
def test_a_member_that_dies_before_or_during_a_switch_breaks_it_for_all_who_came_or_come(after_s):
    """Worker 2 comes after 20 ms, for it has a prompt to compute; the switch takes 20 ms more."""
    costs = replace(COSTS, switch=SwitchCosts(handshake_s=0.02, move_s=0.0, move_byte_s=0.0))
    driven = Driven(3, costs=costs)
    driven.generate(2, *some_requests((50,), prompt=10))
    driven.cluster.kill(0, after_s=after_s)
    driven.switch([(0,), (1,), (2,)], ((0, 1), (2,)))
    driven.until(1.0)
    if after_s < 0.04:
        assert not driven.all(Switched)
    assert {r.worker for r in driven.all(LeaseBroken)} == {1, 2} - ({2} if after_s > 0.04 else set())
    driven.cluster.restart(0)
    driven.connect()
    driven.open("p")
    driven.update()
    driven.run()
    assert {r.worker for r in driven.all(Updated)} == {0, 1, 2}


def test_who_comes_for_a_lease_after_a_member_has_died_does_not_wait_for_it(tmp_path):
    driven = Driven(3, pipelines={"p": config(), "q": config()})
    driven.send([0], Save(**driven.of("q"), step=0, folder=str(tmp_path), source=""))
    driven.update()
    driven.cluster.kill(1, after_s=0.1)
    driven.until(0.15)
    assert {r.worker for r in driven.all(LeaseBroken)} == {2}
    driven.until(0.5)
    assert {r.worker for r in driven.all(LeaseBroken)} == {0, 2}
    driven.cluster.restart(1)
    driven.connect()
    driven.open("p")
    driven.update()
    driven.run()
    assert {r.worker for r in driven.all(Updated)} == {0, 1, 2}


# Profiles and progress


@pytest.mark.parametrize("fine", [False, True])
def test_a_profile_finds_the_costs_that_the_simulation_goes_by(fine):
    driven = Driven(2)
    lease = driven.lease((0, 1), purpose="profile")
    driven.send((0, 1), Profile(**driven.of("p"), lease=lease, degrees=(1, 2, 3), fine=fine))
    driven.run()
    first, second = sorted(driven.all(Profiled), key=lambda r: r.worker)
    assert (first.lease_id, second.lease_id, second.table) == (lease.lease_id, lease.lease_id, None)
    table = from_plain(first.table)
    assert (table.degrees, table.kv_heads, table.kv_bytes, table.detail) == (
        (1, 2), 4, 1024, "full" if fine else "coarse",
    )  # fmt: skip
    assert table.switch == COSTS.switch
    for degree, costs in ((1, NARROW), (2, PAIR)):
        for batch, context in ((1, 200), (3, 1000), (20, 30_000), (700, 10_000)):
            assert table.decode_s(degree, batch, context) == pytest.approx(costs.step_s(batch, context))
        assert table.prefill_s(degree, np.array([333])) == pytest.approx([333 * costs.per_prompt_token_s])
    assert driven.now >= COSTS.profile_s


def test_leaders_and_single_workers_say_how_far_their_samples_are():
    driven = Driven(3)
    driven.switch([(0,), (1,)], TWO)
    driven.generate(0, *some_requests((500, 1), prompt=1))
    driven.generate(2, *some_requests((9,), prompt=2000, first=2))
    start = COSTS.switch.handshake_s + PAIR.per_prompt_token_s
    seen = {0: 0, 1: 0, 2: 0}
    while driven.now < 1.0:
        for report in driven.cluster.poll(1.0):
            if not isinstance(report, Alive):
                continue
            seen[report.worker] += 1
            ((name, generated),) = zip(report.request_ids, report.generated, strict=True)
            if report.worker == 2:
                assert (name, generated.size) == ("r2", 0), "the prompt takes seconds"
            else:
                steps = sum(PAIR.steps_s(n, 1, 2) <= driven.now - start for n in range(1, 500))
                assert (name, generated.tolist()) == ("r0", [1 + steps, -1])
                assert generated.dtype == np.int32
    assert seen == pytest.approx({0: 20, 1: 0, 2: 20}, abs=1)


def test_workers_say_how_far_samples_are_unless_there_is_only_one_whatever_the_layout():
    for workers, tp, costs in ((2, 1, COSTS), (2, "auto", replace(COSTS, decode_by_degree={})), (1, "auto", COSTS)):
        driven = Driven(workers, pipelines={"p": config(tp=tp)}, costs=costs)
        driven.generate(0, *some_requests((50,)))
        driven.run()
        assert len(driven.ends()) == 1
        assert bool(driven.all(Alive)) == (workers > 1)
