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

from longtail.cluster.messages import Command, Connect, Lost, Report
from longtail.cluster.simulated_connections import SimulatedConnections
from longtail.cluster.simulated_worker import Lengths, SimulatedWorker
from longtail.core.errors import CapacityError
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
    seconds; a restarted worker takes ``start_s``. Where the layout of a rollout may change, workers say how far it is
    every ``alive_s`` seconds.

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
        alive_s: float = 0.05,
        start_time: float = 0.0,
    ) -> None:
        self.workers = workers
        self.devices = ["simulated"] * workers
        self.clock = VirtualClock(start_time)
        self._costs, self._lengths = costs, lengths
        self._message_s, self._start_s, self.alive_s = message_s, start_s, alive_s
        self._events: list[_Event] = []
        self._number = 0
        self._reports: list[Report] = []
        self._awake = False
        self._slots: dict[int, SimulatedWorker] = {}
        self.connections = SimulatedConnections(self)
        for worker in range(workers):
            self._slots[worker] = self._fresh(worker)

    # What the controller calls

    def send(self, worker: int, commands: Sequence[Command]) -> None:
        target = self._slots.get(worker)
        for command in commands:
            if isinstance(command, Connect):
                self.connections.announce(worker, command.generation, arrives=target is not None)
        if target is not None:
            self.later(self._message_s, lambda: target.receive(commands) if self._alive(target) else None)

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
        self.later(after_s, lambda: self._die(worker))

    # What workers call

    def worker(self, index: int) -> SimulatedWorker:
        """Raises ``KeyError`` if it is lost."""
        return self._slots[index]

    def after(self, worker: SimulatedWorker, seconds: float, happen: Callable[[], None]) -> None:
        """Call ``happen`` in so many seconds, if ``worker`` still lives then."""
        self.later(seconds, lambda: happen() if self._alive(worker) else None)

    def later(self, seconds: float, happen: Callable[[], None]) -> None:
        """Call ``happen`` in so many seconds."""
        self._number += 1
        heapq.heappush(self._events, _Event(self.clock.now + seconds, self._number, happen))

    def report(self, report: Report) -> None:
        """On its way to the controller; what is on its way arrives, even if the sender dies."""
        self.later(self._message_s, lambda: self._reports.append(report))

    def _die(self, worker: int) -> None:
        lost = self._slots.pop(worker, None)
        if lost is None:
            return
        self.report(Lost(worker=worker, reason="killed"))
        self.connections.lost(lost)

    def _alive(self, worker: SimulatedWorker) -> bool:
        return self._slots.get(worker.index) is worker

    def _fresh(self, worker: int) -> SimulatedWorker:
        return SimulatedWorker(worker, world=self.workers, cluster=self, costs=self._costs, lengths=self._lengths)
