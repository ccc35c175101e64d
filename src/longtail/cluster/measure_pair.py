"""What the work of two models does to each other: on the same worker at several shares of its time, and on neighbours.

Both pipelines are open on all workers, and have nothing else to do. Weights, optimizers and lanes are as before.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any

from longtail.cluster import measure_interference as interference
from longtail.cluster.connections import Connections
from longtail.cluster.measure import Tell, silent, tenant_key
from longtail.cluster.measure_classes import quick_classes
from longtail.cluster.measure_interference import Classes, Slowdowns
from longtail.cluster.measure_together import Together
from longtail.costs.interference import SHARES, Shared
from longtail.costs.interference_file import Half, PairTable, to_plain

if TYPE_CHECKING:
    from longtail.cluster.tenant import Tenant

QUANTUM_S = 0.05
"""What quanta are to take: there are some hundred windows to measure, each of several of them."""


def measure_pair(
    first: Tenant, second: Tenant, connections: Connections, *, tell: Tell = silent
) -> dict[str, Any] | None:
    """The :class:`PairTable` of both as plain data on the first worker; None on the others.

    Collective. Raises :class:`PeerLost`, and on all workers alike :class:`CapacityError` where lanes are too few.
    """
    together = Together(connections.world)
    free = [tenant.store.free for tenant in (first, second)]
    with contextlib.ExitStack() as stack:
        tell("sizes of quanta", 0.0)
        mine, other = (quick_classes(tenant, together, QUANTUM_S, stack) for tenant in (first, second))
        same = _in_turns(together, mine, other, tell)
        neighbour: tuple[Slowdowns, Slowdowns] = ({}, {})
        if together.size > 1:
            neighbour = interference.beside_neighbours(
                together, mine, other, tell=lambda what, share: tell(f"beside neighbours: {what}", 0.8 + 0.2 * share)
            )
    for tenant, before in zip((first, second), free, strict=True):
        tenant.store.check()
        assert tenant.store.free == before, f"profiling took {before - tenant.store.free} KV blocks of {tenant.name}"
    if together.rank != 0:
        return None
    one, two = (
        Half(key=tenant_key(tenant, connections), same_worker=shared, neighbour_worker=beside)
        for tenant, shared, beside in zip((first, second), same, neighbour, strict=True)
    )
    return to_plain(PairTable(measured=datetime.now(UTC).isoformat(timespec="seconds"), halves=(one, two)))


SharedBy = dict[str, dict[str, Shared]]


def _in_turns(together: Together, mine: Classes, other: Classes, tell: Tell) -> tuple[SharedBy, SharedBy]:
    """Of each side: ``[a][b]`` are the factors of a beside b of the other side, at each of ``SHARES``."""
    ours: SharedBy = {a: {} for a in mine}
    theirs: SharedBy = {b: {} for b in other}
    for n, (a, b) in enumerate(product(mine, other)):
        tell(f"in turns on one worker: {a}, {b}", 0.8 * n / (len(mine) * len(other)))
        by_share = interference.in_shares(together, mine[a], other[b], SHARES)
        ours[a][b] = _shared([factor for factor, _ in by_share])
        theirs[b][a] = _shared([factor for _, factor in reversed(by_share)])
    return ours, theirs


def _shared(factors: list[float]) -> Shared:
    low, middle, high = factors
    return low, middle, high
