"""Which pipeline may use which workers for what needs all of them at once.

Invariants: a worker is in at most one lease; a lease is granted for all its workers or not at all; nobody
overtakes an earlier request for any of the same workers (who holds them may still change what it does with them). So
no two collectives can wait for each other, and no request waits for ever, as long as holders let go: updates and
profiles end by themselves, a pipeline's switches when its rollout does, or earlier when others have work
(``runtime/widen.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from longtail.core.types import Lease, Purpose


class _Asked(NamedTuple):
    pipeline: str
    workers: tuple[int, ...]
    purpose: Purpose


class LeaseBook:
    """The controller's record of leases asked for and held."""

    def __init__(self) -> None:
        self._next_id = 0
        self._asked: list[_Asked] = []
        self._held: dict[int, Lease] = {}
        self._working: dict[int, set[int]] = {}

    def ask(self, pipeline: str, workers: tuple[int, ...], purpose: Purpose = "update") -> None:
        """Queue a request; :meth:`grant` answers it.

        A pipeline that holds leases for switches of some of ``workers`` gets them anew as one lease, which has the
        workers of all of them.
        """
        self._asked.append(_Asked(pipeline, workers, purpose))

    def grant(self) -> list[Lease]:
        """Every lease that can start now, in the order of asking."""
        holders = {worker: lease for lease in self._held.values() for worker in lease.workers}
        spoken_for: set[int] = set()
        granted, waiting = [], []
        for asked in self._asked:
            own = {holders[w] for w in asked.workers if w in holders and self._extends(asked, holders[w])}
            workers = tuple(sorted({*asked.workers, *(w for lease in own for w in lease.workers)}))
            takes = {w for w in workers if holders.get(w) not in own}
            kept = all(lease.lease_id in self._held for lease in own)
            if kept and takes.isdisjoint(spoken_for) and takes.isdisjoint(holders):
                for lease in own:
                    self.release(lease.lease_id)
                granted.append(self._grant(asked, workers))
            else:
                waiting.append(asked)
            spoken_for.update(takes)
        self._asked = waiting
        return granted

    @property
    def idle(self) -> bool:
        """Whether nobody holds a lease."""
        return not self._held

    @property
    def grouped(self) -> frozenset[int]:
        """The workers that are under a lease for a switch: in a tensor-parallel group, or about to go over to another
        layout."""
        return frozenset(w for lease in self._held.values() if lease.purpose == "switch" for w in lease.workers)

    def holds(self, pipeline: str) -> bool:
        """Whether ``pipeline`` has a lease."""
        return any(lease.pipeline == pipeline for lease in self._held.values())

    def member_done(self, pipeline: str, worker: int, lease_id: int | None = None) -> None:
        """``worker`` has done (or given up) its part of a lease of ``pipeline`` (None: of all); the lease ends with its
        last member."""
        for held_id, lease in list(self._held.items()):
            if lease.pipeline == pipeline and lease_id in (None, held_id):
                working = self._working[held_id]
                working.discard(worker)
                if not working:
                    self.release(held_id)

    def release(self, lease_id: int) -> None:
        """End a lease at once, e.g. because nobody was told of it."""
        del self._held[lease_id], self._working[lease_id]

    def withdraw(self, pipeline: str, purpose: Purpose | None = None) -> None:
        """Drop what ``pipeline`` has asked for, for ``purpose`` or (None) for anything."""
        self._asked = [
            asked for asked in self._asked if asked.pipeline != pipeline or purpose not in (None, asked.purpose)
        ]

    def forget(self, pipeline: str) -> None:
        """Drop what ``pipeline`` has asked for, and what it holds for switches: its groups are being dissolved."""
        self.withdraw(pipeline)
        for lease in list(self._held.values()):
            if lease.pipeline == pipeline and lease.purpose == "switch":
                self.release(lease.lease_id)

    def clear(self) -> None:
        """After a worker was lost, no lease is valid any more."""
        self._asked.clear()
        self._held.clear()
        self._working.clear()

    def _grant(self, asked: _Asked, workers: tuple[int, ...]) -> Lease:
        lease = Lease(lease_id=self._next_id, pipeline=asked.pipeline, workers=workers, purpose=asked.purpose)
        self._next_id += 1
        self._held[lease.lease_id] = lease
        self._working[lease.lease_id] = set(workers)
        return lease

    @staticmethod
    def _extends(asked: _Asked, lease: Lease) -> bool:
        return asked.pipeline == lease.pipeline and asked.purpose == lease.purpose == "switch"


class Leases:
    """The lease book as pipeline ``name`` sees it; ``contended`` says whether others have work for the workers."""

    def __init__(self, book: LeaseBook, name: str, *, contended: Callable[[], bool]) -> None:
        self._book, self._name, self.contended = book, name, contended

    def beside(self, busy: Callable[[], bool]) -> Leases:
        """The same for one of two things that the pipeline does at once: contended also while the other is ``busy``."""
        return Leases(self._book, self._name, contended=lambda: busy() or self.contended())

    @property
    def grouped(self) -> frozenset[int]:
        """The workers that sample in groups, of whatever pipeline: other work waits there until they let go."""
        return self._book.grouped

    def ask(self, workers: tuple[int, ...], purpose: Purpose) -> None:
        self._book.ask(self._name, workers, purpose)

    def release(self, lease: Lease) -> None:
        """``lease`` is not needed any more, and nobody was told of it."""
        self._book.release(lease.lease_id)

    def withdraw(self) -> None:
        """No switch that was asked for is wanted any more."""
        self._book.withdraw(self._name, "switch")

    def forget(self) -> None:
        """Nothing that was asked for is wanted any more, and groups that exist are being dissolved by other means."""
        self._book.forget(self._name)
