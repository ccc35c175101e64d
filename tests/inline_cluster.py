"""A cluster whose workers are threads of this process: the real worker loop and collectives, without Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import torch

from longtail.cluster.connections import Connections
from longtail.cluster.messages import Command, Connect, Lost, Report
from longtail.cluster.worker import Worker


class InlineCluster:
    """See ``longtail.cluster.protocol.Cluster``. ``kill(worker)`` makes a worker vanish between two quanta."""

    def __init__(self, workers: int, *, communicator: str = "auto") -> None:
        self.workers, self.communicator = workers, communicator
        self.devices = ["thread"] * workers
        self._stores: dict[str, torch.distributed.Store] = {}
        self._lost: queue.SimpleQueue[Lost] = queue.SimpleQueue()
        self._awake = threading.Event()
        self._slots: dict[int, Worker] = {}
        self._threads: list[threading.Thread] = []
        self.sent: list[tuple[int, Command]] = []
        for worker in range(workers):
            self.restart(worker)

    def _connect_as(self, rank: int):
        def connect(command: Connect):
            store = None
            if self.workers > 1:
                store = self._stores.setdefault(command.store, torch.distributed.HashStore())
            return Connections(
                store,
                worker=rank,
                world=self.workers,
                device=torch.device("cpu"),
                kind=self.communicator,
                host="here",
                interface_address="127.0.0.1",
                timeout_s=120.0,
            )

        return connect

    def send(self, worker: int, commands: Sequence[Command]) -> None:
        self.sent += [(worker, command) for command in commands]
        if worker in self._slots:
            for command in commands:
                self._slots[worker].give(command)

    def poll(self, timeout_s: float) -> list[Report]:
        reports: list[Report] = []
        for _ in range(max(1, int(timeout_s / 0.005))):
            while not self._lost.empty():
                reports.append(self._lost.get())
            for worker in list(self._slots.values()):
                reports += worker.outbox.take(0)
            if reports or self._awake.wait(0.005):
                break
        self._awake.clear()
        return reports

    def wake(self) -> None:
        self._awake.set()

    def kill(self, worker: int) -> None:
        """The worker stops as if its process had died: nothing more is heard of it."""
        gone = self._slots.pop(worker)
        gone.die()
        self._lost.put(Lost(worker=worker, reason="killed by the test"))

    def restart(self, worker: int) -> None:
        fresh = Worker(worker, self.workers, device=torch.device("cpu"), connect=self._connect_as(worker))
        self._slots[worker] = fresh
        thread = threading.Thread(target=fresh.run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def rendezvous(self, generation: int) -> str:
        return f"generation-{generation}"

    def close(self) -> None:
        for worker in self._slots.values():
            worker.die()
        for thread in self._threads:
            thread.join(timeout=60)
