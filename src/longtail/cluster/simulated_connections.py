"""Who meets whom on simulated workers: what ``cluster/connections.py`` and its communicators are to real ones.

Connections are made anew for each generation. A worker that dies, stops, connects anew, or gives up its connections
because a peer did, cannot be met any more in the generations until then: whoever waits for it, or shares something with
it, hears of that at once and gives up its own. So nobody ever waits for somebody who does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longtail.cluster.simulated_together import begin
from longtail.core.types import Lease

if TYPE_CHECKING:
    from longtail.cluster.simulated import SimulatedCluster
    from longtail.cluster.simulated_worker import SimulatedWorker


@dataclass(eq=False)
class _Meeting:
    """``there`` are those who came, each for all of its group, which are ``present`` of the lease's ``members``."""

    members: frozenset[int]
    generation: int
    there: list[SimulatedWorker] = field(default_factory=list)
    present: set[int] = field(default_factory=set)


class SimulatedConnections:
    """Of all workers of ``cluster``."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._newest = 0
        self._generation: dict[int, int] = {}
        """By worker that is connected."""
        self._gone: dict[int, int] = {}
        """By worker: the last generation in which it cannot be met."""
        self._meetings: dict[int, _Meeting] = {}
        """By lease."""

    def announce(self, worker: int, generation: int, *, arrives: bool) -> None:
        """``worker`` is told to connect; ``arrives``: there is such a worker."""
        self._newest = max(self._newest, generation)
        if not arrives:
            self._gone[worker] = generation

    def connect(self, worker: SimulatedWorker, generation: int) -> None:
        """``worker`` gives up the connections that it has, and makes new ones."""
        self.disconnect(worker, f"worker {worker.index} connects anew")
        self._generation[worker.index] = generation

    def disconnect(self, worker: SimulatedWorker, why: str) -> None:
        """``worker`` gives up its connections."""
        generation = self._generation.get(worker.index)
        if generation is not None:
            self._part(worker, generation, why)

    def lost(self, worker: SimulatedWorker) -> None:
        """The process of ``worker`` is gone."""
        self._part(worker, self._newest, f"worker {worker.index} is gone")

    def meet(self, worker: SimulatedWorker, lease: Lease) -> None:
        """``worker`` has come, with its group, for what the members of ``lease`` do together: it begins when all are
        there. If that cannot be, all who are there hear of it at once."""
        generation = self._generation.get(worker.index, -1)
        meeting = self._meetings.get(lease.lease_id)
        why = self._obstacle(worker, generation, lease, meeting)
        if why is not None:
            self._part(worker, max(generation, meeting.generation if meeting else -1), why)
            worker.broken(why)
            return
        if meeting is None:
            meeting = self._meetings[lease.lease_id] = _Meeting(frozenset(lease.workers), generation)
        meeting.there.append(worker)
        meeting.present.update(worker.team)
        if len(meeting.present) == len(meeting.members):
            meeting.there.sort(key=lambda member: member.index)
            joint = begin(meeting.there, self._cluster)
            self._cluster.later(joint.seconds, lambda: self._over(meeting, lease.lease_id, joint.end))

    def _obstacle(self, worker: SimulatedWorker, generation: int, lease: Lease, meeting: _Meeting | None) -> str | None:
        """Why ``worker`` cannot meet the others."""
        if generation < 0 or (meeting is not None and meeting.generation != generation):
            return f"worker {worker.index} is not connected to its peers"
        if meeting is None:  # else it would have been broken
            for member in lease.workers:
                if self._gone.get(member, -1) >= generation:
                    return f"worker {member} is gone"
        return None

    def _over(self, meeting: _Meeting, lease_id: int, end: Callable[[], None]) -> None:
        if self._meetings.get(lease_id) is meeting:
            del self._meetings[lease_id]
            end()

    def _part(self, worker: SimulatedWorker, generation: int, why: str) -> None:
        """``worker`` cannot be met up to ``generation``: what it shares with others breaks, and what those share."""
        left, leaving = {worker.index}, [worker]
        while leaving:
            one = leaving.pop()
            self._gone[one.index] = max(generation, self._gone.get(one.index, -1))
            self._generation.pop(one.index, None)
            near = [peer for peer in self._peers(one, generation) if peer not in left]
            left.update(near)
            leaving += [self._cluster.worker(peer) for peer in near]
        for index in sorted(left - {worker.index}):
            self._cluster.worker(index).broken(why)

    def _peers(self, worker: SimulatedWorker, generation: int) -> Iterator[int]:
        """Who shares a group or a meeting with ``worker``; the meetings end with that."""
        yield from worker.team
        for lease_id, meeting in list(self._meetings.items()):
            if worker.index in meeting.members and meeting.generation <= generation:
                del self._meetings[lease_id]
                yield from meeting.present
