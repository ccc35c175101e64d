"""Workers without machines: a discrete-event simulation behind the same protocol as real clusters.

The controller, the drivers and the planner run as they are; commands, reports, attempts, leases and deaths follow the
rules of real workers. Only the work is replaced by its cost (``costs/worker.py``), and responses by their lengths.

Time is virtual: :attr:`SimulatedCluster.clock` stands still while the controller thinks and jumps to the next event
when it polls. Pass it to the controller. Nothing is random here, so equal arguments give equal runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longtail.cluster.messages import Command, Lost, Report
from longtail.cluster.simulated_worker import Lengths, SimulatedWorker
from longtail.core.errors import CapacityError
from longtail.core.types import Lease
from longtail.costs.worker import WorkerCosts


class VirtualClock:
    """A :class:`~longtail.core.clock.Clock` that somebody else moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


class _Event(NamedTuple):
    """``number`` keeps events of one moment in the order in which they were made."""

    time: float
    number: int
    happen: Callable[[], None]


class SimulatedCluster:
    """See :class:`~longtail.cluster.protocol.Cluster`.

    ``costs(worker, pipeline)`` says what work takes, ``lengths(pipeline, step, request)`` how long the samples of a
    request would get (their cap and forced lengths are seen to). Each command and report travels for ``message_s``
    seconds; a restarted worker takes ``start_s``.

    >>> cluster = SimulatedCluster(64, costs=lambda worker, pipeline: costs, lengths=lengths)
    >>> Controller(cluster, plans, rewards=rewards, sink=sink, clock=cluster.clock).run()
    """

    def __init__(
        self,
        workers: int,
        *,
        costs: Callable[[int, str], WorkerCosts],
        lengths: Lengths,
        message_s: float = 0.002,
        start_s: float = 10.0,
        start_time: float = 0.0,
    ) -> None:
        self.workers = workers
        self.devices = ["simulated"] * workers
        self.clock = VirtualClock(start_time)
        self._costs, self._lengths = costs, lengths
        self._message_s, self._start_s = message_s, start_s
        self._events: list[_Event] = []
        self._number = 0
        self._reports: list[Report] = []
        self._awake = False
        self._slots: dict[int, SimulatedWorker] = {}
        self._joined: dict[Lease, list[int]] = {}
        """Members that wait inside the collective of a lease."""
        for worker in range(workers):
            self._slots[worker] = self._fresh(worker)

    # What the controller calls

    def send(self, worker: int, commands: Sequence[Command]) -> None:
        target = self._slots.get(worker)
        if target is not None:
            self._after(self._message_s, lambda: target.receive(commands) if self._alive(target) else None)

    def poll(self, timeout_s: float) -> list[Report]:
        deadline = self.clock.now + timeout_s
        while self._events and not self._awake:
            time = self._events[0].time
            if time > (self.clock.now if self._reports else deadline):
                break
            self.clock.now = time
            heapq.heappop(self._events).happen()
        if not self._reports and not self._awake:
            self.clock.now = deadline
        self._awake = False
        reports, self._reports = self._reports, []
        return reports

    def wake(self) -> None:
        self._awake = True

    def restart(self, worker: int) -> None:
        if worker in self._slots:
            raise CapacityError(f"worker {worker} is not lost")
        fresh = self._slots[worker] = self._fresh(worker)
        fresh.pause(self._start_s)

    def rendezvous(self, generation: int) -> str:
        return f"simulated-{generation}"

    def close(self) -> None:
        self._events.clear()
        self._slots.clear()

    # What a test or an experiment may do

    def kill(self, worker: int, *, after_s: float = 0.0) -> None:
        """The worker's process ends ``after_s`` seconds from now: nothing more is heard of it but that it is lost."""
        self._after(after_s, lambda: self._die(worker))

    # What workers call

    def after(self, worker: SimulatedWorker, seconds: float, happen: Callable[[], None]) -> None:
        """Call ``happen`` in so many seconds, if ``worker`` still lives then."""
        self._after(seconds, lambda: happen() if self._alive(worker) else None)

    def report(self, report: Report) -> None:
        """On its way to the controller; what is on its way arrives, even if the sender dies."""
        self._after(self._message_s, lambda: self._reports.append(report))

    def join(self, worker: int, lease: Lease, update_s: float) -> None:
        """``worker`` is inside the collective of ``lease``, which takes ``update_s`` once all members are there."""
        members = self._joined.setdefault(lease, [])
        members.append(worker)
        if len(members) == len(lease.workers):
            del self._joined[lease]
            for member in members:
                target = self._slots[member]
                self.after(target, update_s, target.collective_done)

    def _die(self, worker: int) -> None:
        if self._slots.pop(worker, None) is None:
            return
        self._after(self._message_s, lambda: self._reports.append(Lost(worker=worker, reason="killed")))
        for lease in [lease for lease in self._joined if worker in lease.workers]:
            for member in self._joined.pop(lease):
                if member in self._slots:
                    self._slots[member].collective_broken(f"worker {worker} is gone")

    def _alive(self, worker: SimulatedWorker) -> bool:
        return self._slots.get(worker.index) is worker

    def _fresh(self, worker: int) -> SimulatedWorker:
        return SimulatedWorker(worker, world=self.workers, cluster=self, costs=self._costs, lengths=self._lengths)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, _Event(self.clock.now + seconds, self._number, happen))
