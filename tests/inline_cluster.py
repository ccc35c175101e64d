"""A cluster whose workers are threads of this process: the real worker loop and collectives, without Ray."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from longtail.cluster.connections import Connections
from longtail.cluster.messages import Command, Connect, Lost, Report
from longtail.cluster.worker import Worker


class _WorkerInStep(Worker):
    """Rests after each turn, unless there is a command for it."""

    def __init__(self, cluster: InlineCluster, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._cluster = cluster

    def _turn(self) -> None:
        super()._turn()
        self._cluster.rest(self)

    @property
    def follows(self) -> bool:
        return any(tenant.follows for tenant in self.tenants.values())

    @property
    def has_work(self) -> bool:
        return self._choose() is not None

    @property
    def may_rest(self) -> bool:
        return not self._stopped and not self._arrived and self.inbox.empty()


class InlineCluster:
    """See ``longtail.cluster.protocol.Cluster``. ``kill(worker)`` makes a worker vanish between two quanta.

    If workers are ``in_step``, none is more than a turn ahead of another or of the controller, however long a thread is
    held up: each rests after its turn until all do, and the controller has dealt with whatever they have told. Whoever
    follows in a tensor-parallel group waits for its leader, and nobody for it.
    """

    in_step = False

    def __init__(self, workers: int, *, communicator: str = "auto") -> None:
        self.workers, self.communicator = workers, communicator
        self.devices = ["thread"] * workers
        self._stores: dict[str, torch.distributed.Store] = {}
        self._lost: queue.SimpleQueue[Lost] = queue.SimpleQueue()
        self._awake = threading.Event()
        self._woken = False
        self._turns = threading.Condition()
        self._resting: set[Worker] = set()
        self._following: set[Worker] = set()
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
            self._let_go_on([self._slots[worker]])

    def poll(self, timeout_s: float) -> list[Report]:
        reports: list[Report] = []
        for _ in range(max(1, int(timeout_s / 0.005))):
            workers = list(self._slots.values())
            with self._turns:
                all_rest = self._resting | self._following >= set(workers)
            while not self._lost.empty():
                reports.append(self._lost.get())
            for worker in workers:
                reports += worker.outbox.take(0)
            if reports or self._woken:
                break
            if all_rest:
                self._let_go_on(workers)
            self._awake.wait(0.005)
            self._awake.clear()
        self._woken = False
        return reports

    def wake(self) -> None:
        self._woken = True
        self._awake.set()

    def rest(self, worker: _WorkerInStep) -> None:
        """In the thread of ``worker``, until it may have its next turn."""
        with self._turns:
            self._following.discard(worker)
            if worker.follows:
                self._following.add(worker)
            elif worker.may_rest:
                self._resting.add(worker)
                if worker.has_work:
                    self._awake.set()
                self._turns.wait_for(lambda: worker not in self._resting or not worker.may_rest)
                self._resting.discard(worker)

    def _let_go_on(self, workers: Iterable[Worker]) -> None:
        with self._turns:
            self._resting.difference_update(workers)
            self._turns.notify_all()

    def kill(self, worker: int) -> None:
        """The worker stops as if its process had died: nothing more is heard of it."""
        gone = self._slots.pop(worker)
        gone.die()
        self._let_go_on([gone])
        self._lost.put(Lost(worker=worker, reason="killed by the test"))

    def restart(self, worker: int) -> None:
        kind = partial(_WorkerInStep, self) if self.in_step else Worker
        fresh = kind(worker, self.workers, device=torch.device("cpu"), connect=self._connect_as(worker))
        self._slots[worker] = fresh
        thread = threading.Thread(target=fresh.run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def rendezvous(self, generation: int) -> str:
        return f"generation-{generation}"

    def close(self) -> None:
        for worker in self._slots.values():
            worker.die()
        self._let_go_on(self._slots.values())
        for thread in self._threads:
            thread.join(timeout=60)
