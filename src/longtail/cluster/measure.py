"""The profiler's part on the workers: what work of one pipeline costs here, measured with its own model and lanes.

All workers of a lease measure together, as one quantum, while the pipeline has nothing else to do. Invariants: weights,
optimizer and random numbers are as before, gradients are zero; every lane that was taken is given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from longtail.cluster import measure_interference as interference
from longtail.cluster.connections import Connections
from longtail.cluster.measure_classes import LEAST_TRAIN_TOKENS, Sizes, work_classes
from longtail.cluster.measure_key import LOCAL, processor_of, table_key
from longtail.cluster.measure_rig import STEPS, Rig
from longtail.cluster.measure_sampling import (
    COARSE_BATCHES,
    FINE_BATCHES,
    Points,
    Room,
    between,
    choose_batches,
    choose_contexts,
    decode_grid,
    prefill_costs,
    step_s,
)
from longtail.cluster.measure_switch import handshake_s, moves
from longtail.cluster.measure_together import Pace, Together
from longtail.cluster.measure_training import Training
from longtail.core.comm import Communicator
from longtail.core.errors import CapacityError
from longtail.core.types import Layout
from longtail.costs.interference import QUANTUM_S
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, Slowdowns, SwitchCosts, TableKey
from longtail.costs.table_file import to_plain
from longtail.engine.shard import head_bounds
from longtail.planner.tree import Tree

if TYPE_CHECKING:
    from longtail.cluster.tenant import Tenant

NOTES = "notes"
"""Key of what a fine profile found beside the table: plain data, see :class:`Notes`."""
Tell = Callable[[str, float], None]
"""What is being measured now, and the share of all that is done."""


@dataclass(frozen=True, kw_only=True)
class _Effort:
    """How much to measure. ``decode_s`` and ``move_bytes`` bound what decode steps and moves of a degree may take."""

    pace: Pace
    batches: tuple[int, ...]
    contexts: int
    longest: int
    rounds: int
    again: int
    decode_s: float
    chunks: tuple[int, ...]
    move_bytes: int
    train_tokens: int


COARSE = _Effort(
    pace=Pace(0.06, 0, 5),
    batches=COARSE_BATCHES,
    contexts=2,
    longest=512,
    rounds=1,
    again=4,
    decode_s=2.2,
    chunks=(16, 96),
    move_bytes=8 << 20,
    train_tokens=48,
)
FINE = _Effort(
    pace=Pace(0.5, 3, 9),
    batches=FINE_BATCHES,
    contexts=3,
    longest=4096,
    rounds=2,
    again=16,
    decode_s=40.0,
    chunks=(16, 64, 256),
    move_bytes=32 << 20,
    train_tokens=256,
)
HELD_OUT = 10
TRAIN_S, TRAIN_GROWTH = 0.1, 4
"""A training micro-batch that takes longer is large enough to know what a token costs; else it is made larger."""


@dataclass(frozen=True)
class Notes:
    """``held_out``: (degree, batch, context, measured seconds, seconds by the table) of decode steps that are not in
    the table. ``again``: (seconds, seconds) of the same ones, measured at two moments; the lower is the measured one,
    since disturbances only add time. ``alone``: (batch, context, seconds on one worker alone, seconds with all at work)
    at degree 1. ``left_out``: why a degree was not measured."""

    held_out: list[tuple[int, int, int, float, float]]
    again: list[tuple[float, float]]
    alone: list[tuple[int, int, float, float]]
    left_out: dict[int, str]


def silent(what: str, share: float) -> None:
    """Tell nobody."""


def measure(
    tenant: Tenant, connections: Connections, *, world: int, degrees: Sequence[int], fine: bool, tell: Tell = silent
) -> dict[str, Any] | None:
    """The cost table of ``tenant``'s model as plain data, on the first of ``world`` workers; None on the others.

    Of ``degrees``, those are left out that cannot be: of more workers than there are, or for which memory does not
    suffice. A fine one has :class:`Notes` under the key ``NOTES``, which is no part of the table. Collective. Raises
    :class:`PeerLost`, and on all workers alike :class:`CapacityError` where lanes are too few to measure anything.
    """
    store = tenant.store
    free = store.free
    table, notes = _Profile(tenant, connections, world, degrees, FINE if fine else COARSE, tell).run(fine)
    store.check()
    assert store.free == free, f"profiling took {free - store.free} KV blocks and did not give them back"
    if tenant.worker != 0:
        return None
    plain = to_plain(table)
    return {**plain, NOTES: vars(notes)} if fine else plain


class _Group(NamedTuple):
    """A degree, the layout in which it is measured, and this worker's part: None if it only waits."""

    degree: int
    layout: Layout
    comm: Communicator | None
    room: Room
    points: Points


class _Profile:
    def __init__(
        self, tenant: Tenant, connections: Connections, world: int, degrees: Sequence[int], effort: _Effort, tell: Tell
    ) -> None:
        self.tenant, self.connections, self.effort = tenant, connections, effort
        self.model, self.store, self.rollout = tenant.model, tenant.store, tenant.rollout
        self.together = Together(connections.world)
        self.degrees = sorted({1, *(d for d in degrees if 1 <= d <= min(world, self.model.config.kv_heads))})
        self.left_out: dict[int, str] = {}
        self._tell = tell
        self._parts = len(self.degrees) + 3
        self._part = 0
        self._free = int(-self.together.slowest(-self.store.free))

    def run(self, fine: bool) -> tuple[CostTable, Notes]:
        decode: dict[int, DecodeGrid] = {}
        prefill: dict[int, PrefillCosts] = {}
        notes = Notes([], [], [], self.left_out)
        for degree in self.degrees:
            group = self._group(degree)
            rig, why = self.together.attempt(partial(self._rig, group))
            if why:
                if rig is not None:
                    rig.close()
                if degree == 1:
                    raise CapacityError(why)
                self.left_out[degree] = why
                continue
            try:
                decode[degree], prefill[degree] = self._sampling(group, rig)
                if fine:
                    self._hold_out(group, rig, decode[degree], notes)
                    if degree == 1:
                        notes.alone.extend(self._alone(group, rig, decode[degree]))
            finally:
                if rig is not None:
                    rig.close()
            self._part += 1
        switch = self._switch(self._group(max(decode)))
        self._part += 1
        train_token_s = self._training()
        self._part += 1
        same, neighbour = self._interference(prefill[1], train_token_s, decode[1]) if fine else ({}, {})
        c = self.model.config
        table = CostTable(
            key=tenant_key(self.tenant, self.connections),
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            detail="full" if fine else "coarse",
            kv_heads=c.kv_heads,
            kv_bytes=self.store.block_bytes // self.store.block_tokens,
            decode=decode,
            prefill=prefill,
            switch=switch,
            train_token_s=train_token_s,
            same_worker=same,
            neighbour_worker=neighbour,
        )
        return table, notes

    def _say(self, what: str, share: float = 0.0) -> None:
        self._tell(what, (self._part + min(share, 1.0)) / self._parts)

    # What is measured

    def _group(self, degree: int) -> _Group:
        """Raises :class:`CapacityError` if there is no room for two sequences of two tokens."""
        world, effort, c = self.together.size, self.effort, self.model.config
        layout = Tree.over(range(world), self.degrees).layout(degree)
        mine = layout.group_of(self.tenant.worker)
        comm = self.connections.group(mine) if len(mine) == degree else None
        most_heads = max(last - first for first, last in head_bounds(c.kv_heads, degree))
        room = Room(self._free // most_heads, self.store.block_tokens)
        samples = self.rollout.prompts * self.tenant.trainer.algorithm.group_size
        batch = min(self.rollout.max_running, -(-samples * degree // world))
        contexts = choose_contexts(
            room,
            batch=batch,
            max_tokens=self.rollout.max_tokens,
            max_context=c.max_context,
            most=effort.longest,
            count=effort.contexts,
        )
        if not contexts:
            raise CapacityError(
                f"the KV memory of {self.tenant.name} holds {self._free} blocks of {self.store.block_tokens} tokens,"
                " too few to measure costs with; raise rollout.kv_gib"
            )
        batches = choose_batches(effort.batches, batch, room, contexts[-1])
        return _Group(degree, layout, comm, room, Points(batches, tuple(contexts)))

    def _rig(self, group: _Group) -> Rig | None:
        if group.comm is None:
            return None
        rig = Rig(self.model, self.store, self.rollout, columns=group.room.columns, comm=group.comm)
        rig.warm_up()
        return rig

    def _sampling(self, group: _Group, rig: Rig | None) -> tuple[DecodeGrid, PrefillCosts]:
        effort, name = self.effort, f"TP {group.degree}"
        grid = decode_grid(
            self.together,
            rig,
            group.points,
            pace=effort.pace,
            budget_s=effort.decode_s,
            rounds=effort.rounds,
            again=effort.again,
            tell=lambda batch, share: self._say(f"{name}: decode steps, batch {batch}", 0.8 * share),
        )
        self._say(f"{name}: prefill", 0.8)
        most = min(self.rollout.chunk_tokens, group.room.longest(1), self.model.config.max_context - STEPS)
        chunks = {n for n in effort.chunks if n < most}
        # The largest is the one in use, if there is time for it; a pool of two blocks has room for small ones only.
        chunks |= {most} if effort.rounds > 1 or most <= effort.chunks[-1] else set()
        if len(chunks) < 2:
            chunks |= {max(1, most // 2), most}
        return grid, prefill_costs(self.together, rig, sorted(chunks), effort.pace)

    def _hold_out(self, group: _Group, rig: Rig | None, grid: DecodeGrid, notes: Notes) -> None:
        points = between(grid, group.room, HELD_OUT)
        taken: dict[tuple[int, int], list[float]] = {point: [] for point in points}
        for batch, context in [*points, *reversed(points)]:
            self._say(f"TP {group.degree}: check of batch {batch}", 0.9)
            taken[batch, context].append(step_s(self.together, rig, batch, context, self.effort.pace))
        for (batch, context), (first, second) in taken.items():
            predicted_s = _step_s(grid, batch, context)
            notes.held_out.append((group.degree, batch, context, min(first, second), predicted_s))
            notes.again.append((first, second))

    def _alone(self, group: _Group, rig: Rig | None, grid: DecodeGrid) -> Iterator[tuple[int, int, float, float]]:
        """A few points of the grid on the first worker, while the others wait."""
        if self.together.size == 1:
            return
        context = grid.contexts[len(grid.contexts) // 2]
        for batch in sorted({grid.batches[0], grid.batches[len(grid.batches) // 2], grid.batches[-1]}):
            self._say(f"TP 1 on one worker alone, batch {batch}", 0.95)
            mine = rig if self.together.rank == 0 else None
            seconds = step_s(self.together, mine, batch, context, self.effort.pace)
            yield batch, context, seconds, _step_s(grid, batch, context)

    def _switch(self, group: _Group) -> SwitchCosts:
        """Of the widest groups, or between pairs where there are none."""
        if self.together.size == 1:
            return SwitchCosts(handshake_s=0.0, move_s=0.0, move_byte_s=0.0)
        self._say("moving lanes")
        comm = group.comm
        if group.degree == 1:
            pair = tuple(w for w in (self.together.rank & ~1, self.together.rank | 1) if w < self.together.size)
            comm = self.connections.group(pair) if len(pair) == 2 else None
        most_bytes = self.effort.move_bytes
        costs = moves(self.together, comm, self.store, columns=self._free, most_bytes=most_bytes)
        self._say("changing the layout", 0.5)
        if group.degree == 1:
            return costs
        return replace(costs, handshake_s=handshake_s(self.tenant, self.connections, self.together, group.layout))

    def _training(self) -> float:
        """Of a micro-batch as large as those that a step has, if that does not take too long: small ones cost more for
        each token."""
        trainer, most = self.tenant.trainer, self.tenant.trainer.train.micro_tokens
        tokens = min(self.effort.train_tokens, most)
        while True:
            self._say("training")
            work = Training(trainer, tokens, max_tokens=self.rollout.max_tokens)
            seconds = self.together.median_s(work.run, self.effort.pace._replace(most=3))
            if tokens == most or seconds > TRAIN_S:
                return seconds / work.tokens
            tokens = min(TRAIN_GROWTH * tokens, most)

    def _interference(
        self, prefill: PrefillCosts, train_token_s: float, decode: DecodeGrid
    ) -> tuple[Slowdowns, Slowdowns]:
        """(on the same worker, beside neighbours): see ``measure_interference.py``. All at degree 1."""
        group = self._group(1)
        with contextlib.ExitStack() as stack:
            classes = work_classes(self.tenant, group.room, self._sizes(group, prefill, train_token_s, decode), stack)
            return interference.within_model(
                self.together, classes, tell=lambda what, share: self._say(f"interference: {what}", share)
            )

    def _sizes(self, group: _Group, prefill: PrefillCosts, train_token_s: float, decode: DecodeGrid) -> Sizes:
        contexts = group.points.contexts
        chunk = min(prefill.chunk_tokens[-1], round(QUANTUM_S / prefill.token_s), group.room.longest(4))
        train = min(self.effort.train_tokens, round(QUANTUM_S / train_token_s))
        return Sizes(
            prefill=max(1, chunk),
            train=max(LEAST_TRAIN_TOKENS, train),
            context=contexts[len(contexts) // 2],
            large=decode.batches[-1],
        )


def tenant_key(tenant: Tenant, connections: Connections) -> TableKey:
    """Of what is measured with ``tenant``, on all workers."""
    everyone = tuple(range(connections.world.size))
    return table_key(
        tenant.model.config,
        dtype=str(tenant.model.dtype).removeprefix("torch."),
        processor=processor_of(tenant.model.device),
        workers=len(everyone),
        threads=torch.get_num_threads(),
        communicator=connections.kind_of(everyone) if len(everyone) > 1 else LOCAL,
    )


def _step_s(grid: DecodeGrid, batch: int, context: int) -> float:
    line = grid.at(np.array([batch], float))
    return float(line.base_s[0] + line.context_s[0] * batch * context)
