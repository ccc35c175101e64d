"""What the controller needs of a cluster, real or simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from longtail.cluster.messages import Command, Report


class Cluster(Protocol):
    """A fixed number of worker slots that take commands and give reports.

    ``send`` never blocks and keeps the order of one worker's commands. When a worker's process dies, ``poll``
    yields one :class:`~longtail.cluster.messages.Lost` for it, and nothing of it after that until ``restart``.
    """

    workers: int
    devices: list[str]

    def send(self, worker: int, commands: Sequence[Command]) -> None: ...

    def poll(self, timeout_s: float) -> list[Report]:
        """Reports that have arrived, waiting up to ``timeout_s`` for the first one."""
        ...

    def wake(self) -> None:
        """Make a waiting ``poll`` return at once; callable from any thread."""
        ...

    def restart(self, worker: int) -> None:
        """Start a fresh process in the slot of a lost worker. Raises ``CapacityError`` if none can be had."""
        ...

    def rendezvous(self, generation: int) -> str:
        """A fresh meeting point (``Connect.store``) for the communicator of this generation.

        Raises ``PeerLost`` when the worker that would serve it is gone.
        """
        ...

    def close(self) -> None:
        """End all workers; safe to call twice."""
        ...
