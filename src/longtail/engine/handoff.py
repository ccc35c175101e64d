"""Going over from one layout to another with everything in flight: engines export, all plan alike, lanes move.

Invariants: the engine that gives keeps its requests and lanes until all that is to come has come; so a switch that is
refused, or fails, leaves it as it was. Lanes that stay are not copied. A block of a shared prompt travels once for each
head and receiver, and stays shared. Tokens do not change.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from longtail.core.comm import Communicator
from longtail.core.errors import CapacityError
from longtail.engine.blocks import MISSING, BlockStore
from longtail.engine.cargo import Cargo
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.switch_plan import SwitchPlan


def carry_out(
    plan: SwitchPlan, comm: Communicator, engine: Engine, cargo: Cargo, make_engine: Callable[[LanePool], Engine]
) -> Engine | None:
    """Do this rank's part of ``plan``; ``cargo`` is what ``engine`` exported for it, and it has not stepped since.

    Returns the engine that goes on, made by ``make_engine`` over the lanes it is to have; None if no target group has
    this rank. ``engine`` is at its end then.

    Raises :class:`CapacityError` on every rank if ``make_engine`` does on one, and
    :class:`longtail.core.errors.PeerLost`; ``engine`` is then as it was.
    """
    following, columns, shortage = None, np.empty((0, 0), np.int32), ""
    try:
        following, columns = _adopted(plan, comm.rank, engine, cargo, make_engine)
    except CapacityError as error:
        shortage = str(error)
    try:
        for reason in comm.all_gather_bytes(shortage.encode()):
            if reason:
                raise CapacityError(reason.decode())
        if plan.moved_bytes:
            comm.exchange(*_parcels(plan, comm, engine.lanes.store, cargo.columns, columns))
    except BaseException:
        if following is not None:
            following.let_go()
        raise
    engine.let_go()
    return following


def _adopted(
    plan: SwitchPlan, rank: int, engine: Engine, cargo: Cargo, make_engine: Callable[[LanePool], Engine]
) -> tuple[Engine | None, np.ndarray]:
    """The engine that goes on, and the blocks of its columns, of which some are still to be filled."""
    berth = plan.berth_of(rank)
    if berth is None:
        return None, np.empty((0, 0), np.int32)
    pool = LanePool.over(engine.lanes.store, berth.team.heads_of(rank), berth.columns)
    try:
        following = make_engine(pool)
        columns = _columns_here(plan, rank, cargo)
        following.adopt(berth.groups, columns)
    except BaseException:
        pool.vacate()
        raise
    return following, columns


def _columns_here(plan: SwitchPlan, rank: int, cargo: Cargo) -> np.ndarray:
    """Blocks int32 ``[C, heads]`` of what ``rank`` goes on with: those that are here, ``MISSING`` what will come."""
    berth = plan.berth_of(rank)
    assert berth is not None
    heads = berth.team.heads_of(rank)
    columns = np.full((len(berth.origin), len(heads)), MISSING, np.int32)
    here = [(heads.index(head), cargo.heads.index(head)) for head in heads if head in cargo.heads]
    for number, team in enumerate(plan.source):
        if rank in team.ranks:
            mine = np.flatnonzero(berth.origin[:, 0] == number)
            for to, at in here:
                columns[mine, to] = cargo.columns[berth.origin[mine, 1], at]
    return columns


def _parcels(
    plan: SwitchPlan, comm: Communicator, store: BlockStore, before: np.ndarray, after: np.ndarray
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """What goes to each rank, and where what comes from each goes: blocks by column, then head, keys and values.

    ``before`` and ``after`` are the blocks of the columns that were here, and of those that will be.
    """
    rank, out, into = comm.rank, [], []
    for peer in range(comm.size):
        out.append(_blocks(store, _travelling(plan, rank, peer, before, sent=True)))
        into.append(_blocks(store, _travelling(plan, peer, rank, after, sent=False)))
    return out, into


def _travelling(plan: SwitchPlan, giver: int, receiver: int, columns: np.ndarray, *, sent: bool) -> np.ndarray:
    """Blocks that go from one rank to another, by the numbers of the giver (``sent``) or the receiver."""
    number, team = next((n, team) for n, team in enumerate(plan.source) if giver in team.ranks)
    berth = plan.berth_of(receiver)
    if berth is None:
        return np.empty(0, np.int32)
    at = np.flatnonzero(berth.origin[:, 0] == number)
    held = team.heads_of(giver) if sent else berth.team.heads_of(receiver)
    heads = np.array([held.index(head) for head in team.given(giver, receiver, berth.team)], np.int64)
    return columns[(berth.origin[at, 1] if sent else at)[:, None], heads].ravel()


def _blocks(store: BlockStore, ids: np.ndarray) -> list[Tensor]:
    return [part[block] for block in ids.tolist() for part in (store.k, store.v)]
