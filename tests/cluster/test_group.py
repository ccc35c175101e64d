"""Conferences of a tensor-parallel group: orders reach everybody, and nobody goes on when ranks disagree."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest

from longtail.cluster.group import MOST_STEPS, Group
from longtail.core.errors import Diverged, PeerLost
from longtail.core.types import Emitted, Request, SamplingParams, SubStage
from longtail.engine.engine import StepResult
from longtail.engine.shm import ShmCommunicator


@pytest.fixture
def members(tmp_path):
    """Three members of one group, and a function that lets all of them do something at the same time."""
    with ThreadPoolExecutor(3) as pool:

        def join(rank: int) -> Group:
            comm = ShmCommunicator(tmp_path / "group", rank=rank, size=3, timeout=timedelta(seconds=20))
            return Group((4, 5, 6), comm, lease_id=7)

        groups = list(pool.map(join, range(3)))
        yield groups, lambda work: list(pool.map(work, groups))
        for group in groups:
            group.comm.close()


def drawn(*tokens: int) -> StepResult:
    emitted = [Emitted("r", 0, token, -1.0, None) for token in tokens]
    return StepResult(SubStage.DECODE, len(tokens), len(tokens), emitted=emitted)


def request(name: str) -> Request:
    return Request(request_id=name, prompt=np.array([1, 2]), seeds=(0,), params=SamplingParams(max_tokens=4))


def test_what_the_leader_was_told_reaches_every_member_once(members):
    groups, together = members
    assert [group.leads for group in groups] == [True, False, False]
    groups[0].take_in(request("a"), 1.0)
    groups[0].take_in(request("b"), 2.0)
    assert groups[0].has_orders
    for orders in together(lambda group: group.confer(busy=False)):
        assert [(r.request_id, at) for r, at in orders.requests] == [("a", 1.0), ("b", 2.0)]
        assert orders.steps > 0
    assert not groups[0].has_orders
    assert all(orders.requests == () and orders.steps == 0 for orders in together(lambda g: g.confer(busy=False)))


def test_fast_steps_make_long_bursts_and_slow_ones_short_ones(members):
    groups, together = members

    def burst(seconds: float) -> int:
        for group in groups:
            for _ in range(40):
                group.stepped(drawn(3), seconds)
        (steps,) = {orders.steps for orders in together(lambda group: group.confer(busy=True))}
        return steps

    assert burst(1e-5) == MOST_STEPS
    assert burst(1.0) == 1


def test_members_that_sampled_different_tokens_all_stop_with_a_sentence(members):
    groups, together = members
    for group in groups:
        group.stepped(drawn(5, 6), 0.01)
    together(lambda group: group.confer(busy=True))
    for group in groups:
        group.stepped(drawn(5, 8 if group.workers[group.comm.rank] == 6 else 7), 0.01)

    def confer(group: Group) -> str:
        with pytest.raises(Diverged) as caught:
            group.confer(busy=True)
        return str(caught.value)

    (sentence,) = set(together(confer))
    assert sentence.startswith("worker 6 sampled other tokens than worker 4")


def test_a_member_that_is_gone_is_noticed(members):
    groups, together = members
    groups[1].comm.close()

    def confer(group: Group) -> None:
        if group is not groups[1]:
            with pytest.raises(PeerLost):
                group.confer(busy=True)

    together(confer)
