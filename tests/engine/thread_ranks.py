"""Threads as ranks: a communicator between them, and rollouts that change their layout on the way."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from longtail.core.comm import Communicator
from longtail.core.errors import PeerLost
from longtail.core.types import Completion, Request
from longtail.engine.blocks import BlockStore
from longtail.engine.engine import Engine
from longtail.engine.handoff import carry_out
from longtail.engine.lanes import LanePool
from longtail.engine.model import Decoder
from longtail.engine.switch_plan import How, Refusal, SwitchCosts, SwitchPlan, plan_switch

FREE_TO_MOVE = SwitchCosts(per_byte_s=0.0, per_token_s=1.0)


class Meeting:
    """Where the ranks of one group lay down what the others may see."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=120)
        self.table: list[Any] = [None] * size


class ThreadComm:
    """A communicator between threads, for any tensors; ``sent`` counts the bytes that went to each rank."""

    kind = "threads"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.sent = [0] * self.size

    def _lay_down(self, mine: Any) -> list[Any]:
        """What every rank lays down; it may be read until the next call of :meth:`barrier`."""
        self._meeting.table[self.rank] = mine
        self.barrier()
        return list(self._meeting.table)

    def barrier(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise PeerLost("a rank is gone") from error

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        given = self._lay_down(data)
        self.barrier()
        return given

    def all_gather_shards(self, flat: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
        for rank, other in enumerate(self._lay_down(flat)):
            if rank != self.rank:
                flat[slice(*bounds[rank])] = other[slice(*bounds[rank])]
        self.barrier()

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        total = sum(part.clone() for part in self._lay_down(tensor))
        self.barrier()
        tensor.copy_(total)

    def exchange(self, out: Sequence[Sequence[torch.Tensor]], into: Sequence[Sequence[torch.Tensor]]) -> None:
        assert len(out) == len(into) == self.size
        assert not out[self.rank]
        assert not into[self.rank]
        self.sent = [sum(part.nbytes for part in parts) for parts in out]
        for rank, given in enumerate(self._lay_down(out)):
            for source, target in zip(given[self.rank], into[rank], strict=True):
                assert source.is_contiguous()
                assert target.is_contiguous()
                target.copy_(source)
        self.barrier()

    def close(self) -> None:
        pass


Connect = Callable[[tuple[int, ...], int], Communicator]
"""Given the ranks of a group and one's own rank in it."""


class World:
    """``size`` ranks, each in a thread; :meth:`comm` is the communicator of some of them, made by ``connect`` once."""

    def __init__(self, size: int, connect: Connect | None = None) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._connect = connect or self._meet
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._comms: dict[tuple[tuple[int, ...], int], Communicator] = {}

    def comm(self, ranks: Sequence[int], me: int) -> Communicator:
        key = tuple(ranks), me
        if key not in self._comms:
            self._comms[key] = self._connect(key[0], key[0].index(me))
        return self._comms[key]

    def _meet(self, ranks: tuple[int, ...], rank: int) -> ThreadComm:
        with self._lock:
            meeting = self._meetings.setdefault(ranks, Meeting(len(ranks)))
        return ThreadComm(meeting, rank)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """``work(rank)`` of every rank, then all is closed. Raises the error that came first, not those it led to."""

        def guarded(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException:
                with self._lock:
                    for meeting in self._meetings.values():
                        meeting.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
        for comm in self._comms.values():
            comm.close()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
            raise error
        return [future.result() for future in futures]


@dataclass
class Switch:
    """After ``steps`` more quanta of each engine, the layout becomes ``groups``."""

    steps: int
    groups: tuple[tuple[int, ...], ...]
    how: How = How.MOVE
    costs: SwitchCosts = FREE_TO_MOVE
    rebalance: bool = False


@dataclass
class Rank:
    """What one rank has at hand, and what came of it."""

    rank: int
    world: World
    engine: Engine
    groups: tuple[tuple[int, ...], ...]
    done: dict[tuple[str, int], Completion] = field(default_factory=dict)
    plans: list[SwitchPlan | Refusal] = field(default_factory=list)
    steps: int = 0

    @property
    def group(self) -> tuple[int, ...]:
        return next(group for group in self.groups if self.rank in group)

    def advance(self, steps: int | None = None) -> None:
        """So many quanta, or fewer if the work ends; None: until it ends."""
        while self.engine.has_work and steps != 0:
            for c in self.engine.step().completions:
                assert (c.request_id, c.sample) not in self.done
                self.done[c.request_id, c.sample] = c
            self.engine.lanes.store.check()
            self.steps += 1
            steps = None if steps is None else steps - 1

    def switch(self, switch: Switch, make_engine: Callable[[LanePool, Sequence[int]], Engine]) -> None:
        comm, cargo = self.world.comm(range(self.world.size), self.rank), self.engine.export()
        if isinstance(comm, ThreadComm):
            comm.sent = [0] * comm.size
        cargos = [pickle.loads(data) for data in comm.all_gather_bytes(pickle.dumps(cargo))]
        plan = plan_switch(
            cargos, self.groups, switch.groups, costs=switch.costs, how=switch.how, rebalance=switch.rebalance
        )
        self.plans.append(plan)
        if isinstance(plan, Refusal):
            return
        store = self.engine.lanes.store
        mine = next((group for group in switch.groups if self.rank in group), (self.rank,))
        following = carry_out(plan, comm, self.engine, cargo, lambda lanes: make_engine(lanes, mine))
        if isinstance(comm, ThreadComm):
            assert sum(comm.sent) == plan.sent_bytes[self.rank]
        kv_heads = range(store.config.kv_heads)
        self.engine = following or make_engine(LanePool.over(store, kv_heads), (self.rank,))
        left = set(range(self.world.size)) - {rank for group in switch.groups for rank in group}
        self.groups = switch.groups + tuple((rank,) for rank in sorted(left))
        store.check()


@dataclass
class Outcome:
    done: dict[tuple[str, int], Completion]
    plans: list[SwitchPlan | Refusal]
    ranks: list[Rank]


def rollout(
    model: Decoder,
    loads: Sequence[Sequence[Request]],
    switches: Sequence[Switch],
    *,
    blocks: int | Sequence[int] = 600,
    block_tokens: int = 16,
    connect: Connect | None = None,
    **options: Any,
) -> Outcome:
    """Rank r begins alone with ``loads[r]``; all ends, and every rank of a group has seen the same."""
    size = len(loads)
    world = World(size, connect)
    sizes = [blocks] * size if isinstance(blocks, int) else list(blocks)

    def make_engine(lanes: LanePool, group: Sequence[int], rank: int) -> Engine:
        comm = {"comm": world.comm(group, rank)} if len(group) > 1 else {}
        return Engine(model, lanes, **comm, **options)

    def work(rank: int) -> Rank:
        store = BlockStore(model.config, blocks=sizes[rank], block_tokens=block_tokens, dtype=model.dtype)
        engine = make_engine(LanePool.over(store, range(model.config.kv_heads)), (rank,), rank)
        me = Rank(rank, world, engine, tuple((r,) for r in range(size)))
        for item in loads[rank]:
            engine.add(item)
        for switch in switches:
            me.advance(switch.steps)
            me.switch(switch, lambda lanes, group: make_engine(lanes, group, rank))
        me.advance()
        assert store.free == store.total
        return me

    ranks = world.run(work)
    return Outcome(merged(ranks), ranks[0].plans, ranks)


def merged(ranks: Sequence[Rank]) -> dict[tuple[str, int], Completion]:
    """Completions of all ranks; those that several ranks of a group have seen are the same."""
    done: dict[tuple[str, int], Completion] = {}
    for rank in ranks:
        for key, completion in rank.done.items():
            if key in done:
                assert done[key].tokens.tolist() == completion.tokens.tolist()
                assert done[key].logprobs.tolist() == completion.logprobs.tolist()
            done[key] = completion
    return done
