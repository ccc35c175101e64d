"""Which pipeline may use which workers for a quantum that needs all of them at once.

Invariants: a worker is in at most one lease; a lease is granted for all its workers or not at all; nobody
overtakes an earlier request for any of the same workers. So no two collectives can wait for each other, and no
request waits for ever.
"""

from __future__ import annotations

from longtail.core.types import Lease


class LeaseBook:
    """The controller's record of leases asked for and held."""

    def __init__(self) -> None:
        self._next_id = 0
        self._asked: list[tuple[str, tuple[int, ...]]] = []
        self._held: dict[int, Lease] = {}
        self._working: dict[int, set[int]] = {}

    def ask(self, pipeline: str, workers: tuple[int, ...]) -> None:
        """Queue a request; :meth:`grant` answers it."""
        self._asked.append((pipeline, workers))

    def grant(self) -> list[Lease]:
        """Every lease that can start now, in the order of asking."""
        busy = {worker for lease in self._held.values() for worker in lease.workers}
        granted, waiting = [], []
        for pipeline, workers in self._asked:
            if busy.isdisjoint(workers):
                lease = Lease(lease_id=self._next_id, pipeline=pipeline, workers=workers)
                self._next_id += 1
                self._held[lease.lease_id] = lease
                self._working[lease.lease_id] = set(workers)
                granted.append(lease)
            else:
                waiting.append((pipeline, workers))
            busy.update(workers)
        self._asked = waiting
        return granted

    def member_done(self, pipeline: str, worker: int) -> None:
        """``worker`` has done (or given up) its part; the pipeline's lease ends with its last member."""
        for lease_id, lease in list(self._held.items()):
            if lease.pipeline == pipeline:
                working = self._working[lease_id]
                working.discard(worker)
                if not working:
                    self.release(lease_id)

    def release(self, lease_id: int) -> None:
        """End a lease at once, e.g. because nobody was told of it."""
        del self._held[lease_id], self._working[lease_id]

    def clear(self) -> None:
        """After a worker was lost, no lease is valid any more."""
        self._asked.clear()
        self._held.clear()
        self._working.clear()
