"""A tensor-parallel group of workers, as one member sees it.

All members hold the same sequences and do the same steps; what comes from outside reaches the first member, the
leader, alone. So at the start of each *burst* of steps the members confer: the leader gives its orders (how many steps,
which new requests, or what to do instead), and all compare what they have sampled since. Between two conferences
nobody looks up.

A member that follows takes no commands from its inbox: it waits for orders until the leader dissolves the group.
"""

from __future__ import annotations

import pickle
import time
import zlib
from dataclasses import dataclass, field, replace
from typing import Any

from longtail.cluster.messages import Switch
from longtail.core.comm import Communicator
from longtail.core.errors import Diverged
from longtail.core.types import Request
from longtail.engine.engine import StepResult

BURST_S = 0.03
"""How long a burst is to take: conferring costs some 0.1 ms, and a command waits for the end of a burst."""
MOST_STEPS = 16
CONFER_EVERY_S = 60.0
"""Members that wait for orders longer than their peers' patience would take the leader for dead."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What all members do next: take in ``requests`` (each with the Unix time at which it arrived), then ``switch`` or
    ``leave`` (forgetting all sequences) or else run up to ``steps`` steps, fewer if something happens in one."""

    requests: tuple[tuple[Request, float], ...] = ()
    switch: Switch | None = None
    leave: bool = False
    steps: int = 0


@dataclass
class Group:
    """``workers`` in the order of their ranks, connected by ``comm``; ``lease_id`` lets them sample together."""

    workers: tuple[int, ...]
    comm: Communicator
    lease_id: int
    _orders: Orders = field(default_factory=Orders)
    _digest: int = 0
    _step_s: float = BURST_S
    _conferred: float = field(default_factory=time.monotonic)

    @property
    def leads(self) -> bool:
        return self.comm.rank == 0

    def order(self, **changes: Any) -> None:
        """Change what the leader will say at the next conference; see :class:`Orders`."""
        self._orders = replace(self._orders, **changes)

    def take_in(self, request: Request, arrived: float) -> None:
        self.order(requests=(*self._orders.requests, (request, arrived)))

    @property
    def has_orders(self) -> bool:
        """Whether it is time to confer, even if there are no sequences."""
        overdue = time.monotonic() - self._conferred > CONFER_EVERY_S
        return bool(overdue or self._orders.requests or self._orders.switch or self._orders.leave)

    @property
    def switches(self) -> bool:
        """Whether the next conference orders a switch."""
        return self._orders.switch is not None

    def confer(self, *, busy: bool) -> Orders:
        """The leader's orders, on every member; ``busy``: it has sequences to work on.

        Collective. Raises ``PeerLost``, or :class:`Diverged` on all members alike.
        """
        steps = min(MOST_STEPS, max(1, round(BURST_S / max(self._step_s, 1e-6))))
        mine = replace(self._orders, steps=steps if busy or self._orders.requests else 0) if self.leads else None
        self._orders = Orders()
        self._conferred = time.monotonic()
        said = [pickle.loads(data) for data in self.comm.all_gather_bytes(pickle.dumps((self._digest, mine)))]
        for rank, (digest, _) in enumerate(said):
            if digest != said[0][0]:
                raise Diverged(
                    f"worker {self.workers[rank]} sampled other tokens than worker {self.workers[0]} of the same"
                    " tensor-parallel group: their weights, or the machines, are not the same"
                )
        orders = said[0][1]
        assert isinstance(orders, Orders)
        return orders

    def stepped(self, result: StepResult, seconds: float) -> None:
        """Take note of a step that was done."""
        for emitted in result.emitted:
            self._digest = zlib.crc32(emitted.token.to_bytes(4, "little", signed=True), self._digest)
        self._step_s += 0.2 * (seconds - self._step_s)
