"""What a change of layout costs: one with nothing to move, and the moving of lanes from worker to worker."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from longtail.cluster.connections import Connections
from longtail.cluster.measure_rig import write
from longtail.cluster.measure_together import Pace, Together
from longtail.cluster.messages import Switch, Switched
from longtail.core.comm import Communicator
from longtail.core.types import Layout, Lease
from longtail.costs.table import SwitchCosts
from longtail.engine.blocks import BlockStore
from longtail.engine.lanes import LanePool

if TYPE_CHECKING:
    from longtail.cluster.tenant import Tenant

MOVES = Pace(0.1, 3, 9)
HANDSHAKES = 3


def handshake_s(tenant: Tenant, connections: Connections, together: Together, wide: Layout) -> float:
    """Seconds for going over to ``wide`` and back without sequences, whichever way takes longer; median.

    Without waiting for others to stop, and without the first time, which makes the groups' connections.
    """
    everyone = tuple(range(together.size))
    lease = Lease(lease_id=tenant.lease_id or 0, pipeline=tenant.name, workers=everyone, purpose="switch")

    def switch(layout: Layout) -> float:
        command = Switch(
            pipeline=tenant.name, attempt=tenant.attempt, step=tenant.step, lease=lease, groups=layout.groups
        )
        (report,) = tenant.switch(command, connections).reports
        assert isinstance(report, Switched)
        return together.slowest(report.duration_s)

    def there_and_back() -> float:
        return max(switch(wide), switch(Layout.narrow(together.size)))

    there_and_back()
    taken = sorted(there_and_back() for _ in range(HANDSHAKES))
    tenant.lease_id = lease.lease_id
    return taken[len(taken) // 2]


def moves(
    together: Together, comm: Communicator | None, store: BlockStore, *, columns: int, most_bytes: int
) -> SwitchCosts:
    """Seconds of moving lanes between the ranks of ``comm`` (None: not this worker), all giving as much as they take.

    In the blocks and by the way that a switch moves them, into memory that is there; ``handshake_s`` is 0.
    """
    if comm is None:
        peers, few, many = 0, 0, 0
    else:
        peers = comm.size - 1
        few, many = peers, max(2 * peers, min(columns // 2, most_bytes // store.block_bytes) // peers * peers)
    pool = LanePool.over(store, [0], 2 * many)
    row = pool.open()
    try:
        pool.grow(row, 2 * many * store.block_tokens)
        blocks = pool.tables[row, 0, : 2 * many]
        write(store, blocks)
        seconds = [
            together.median_s(None if comm is None else partial(_exchange_s, comm, store, blocks, n), MOVES)
            for n in (few, many)
        ]
    finally:
        pool.vacate()
    small, large = (together.slowest(n * store.block_bytes) for n in (few, many))
    byte_s = max(seconds[1] - seconds[0], 0.0) / (large - small)
    return SwitchCosts(handshake_s=0.0, move_s=max(0.0, seconds[0] - byte_s * small), move_byte_s=byte_s)


def _exchange_s(comm: Communicator, store: BlockStore, blocks: np.ndarray, count: int) -> float:
    """Seconds of giving ``count`` blocks to the peers and taking as many; ``blocks`` are twice as many, or more."""
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    out: list[list[torch.Tensor]] = [[] for _ in range(comm.size)]
    into: list[list[torch.Tensor]] = [[] for _ in range(comm.size)]
    half = len(blocks) // 2
    for i in range(count):
        peer = peers[i % len(peers)]
        out[peer] += [store.k[blocks[i]], store.v[blocks[i]]]
        into[peer] += [store.k[blocks[half + i]], store.v[blocks[half + i]]]
    start = time.perf_counter()
    comm.exchange(out, into)
    return time.perf_counter() - start
