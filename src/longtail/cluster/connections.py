"""How workers meet: the communicator of all of them, and those of tensor-parallel groups.

One store per generation is where all meet; whatever is made belongs to that generation, and ends with it.
"""

from __future__ import annotations

import tempfile
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from longtail.core.comm import CPU_COMMUNICATOR, Communicator
from longtail.core.errors import CapacityError, PeerLost
from longtail.engine import shm
from longtail.engine.comm import LocalCommunicator, ProcessGroupCommunicator
from longtail.engine.shm import ShmCommunicator

PEER_TIMEOUT_S = 1800.0
"""A dead peer is noticed at once (gloo, shared memory); a live one may be in a long save or load of another job."""
MEETING_S = 120.0
"""How long a group waits for its members to meet: nobody has seen yet that a member lives."""


class Connections:
    """What worker ``worker`` of ``world`` is connected by. Construction waits for all workers.

    ``kind`` is the job file's ``communicator``; ``host`` is the same for workers that share memory. Raises
    :class:`PeerLost` when workers do not meet.
    """

    def __init__(
        self,
        store: dist.Store | None,
        *,
        worker: int,
        world: int,
        device: torch.device,
        kind: str,
        host: str,
        interface_address: str | None,
        timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        self._worker, self._device, self._kind = worker, device, kind
        self._address, self._timeout = interface_address, timedelta(seconds=timeout_s)
        self._store = store
        self._groups: dict[tuple[int, ...], Communicator] = {}
        self._called_off = threading.Event()
        self.world: Communicator = LocalCommunicator()
        if store is None:
            return
        self.world = self._process_group("world", worker, world)
        try:
            store.set(f"host/{worker}", host)
            if worker == 0:
                store.set("token", uuid.uuid4().hex)
            self._token = store.get("token").decode()
            self._hosts = [store.get(f"host/{w}").decode() for w in range(world)]
        except (RuntimeError, dist.DistError) as error:
            raise PeerLost(f"worker {worker} lost the meeting point: {str(error).splitlines()[0]}") from error
        if self._kind in ("auto", "shm") and device.type == "cpu" and CPU_COMMUNICATOR == "shm":
            shm.prepare()  # not when a group is already waiting for it

    def group(self, workers: tuple[int, ...]) -> Communicator:
        """That of ``workers``, made at the first call; all of them must call.

        Raises :class:`PeerLost` when they do not meet. One that has failed stays so until the next generation.
        """
        if workers not in self._groups:
            self._groups[workers] = self._join(workers)
        return self._groups[workers]

    def call_off(self) -> None:
        """From any thread: a new generation is on its way, so nobody will come to meetings of this one any more."""
        self._called_off.set()

    def close(self) -> None:
        """Safe to call twice, and from any thread: peers that wait for this worker learn that it is gone."""
        for comm in [*self._groups.values(), self.world]:
            comm.close()

    def _join(self, workers: tuple[int, ...]) -> Communicator:
        if len(workers) == 1:
            return LocalCommunicator()
        name = f"group-{'-'.join(map(str, workers))}"
        rank, size = workers.index(self._worker), len(workers)
        if self.kind_of(workers) == "shm":
            if len({self._hosts[w] for w in workers}) > 1:
                raise CapacityError("communicator = shm needs workers that share a machine: use auto or gloo")
            path = Path(tempfile.gettempdir()) / f"longtail-{self._token[:16]}-{name}"
            until = min(self._timeout, timedelta(seconds=MEETING_S))
            return ShmCommunicator(
                path,
                rank=rank,
                size=size,
                timeout=self._timeout,
                meet_timeout=until,
                called_off=self._called_off.is_set,
            )
        return self._process_group(name, rank, size)

    def kind_of(self, workers: tuple[int, ...]) -> str:
        """``shm``, ``gloo`` or ``nccl``: what a group of ``workers`` is connected by."""
        if self._kind != "auto":
            return self._kind
        if self._device.type == "cuda":
            return "nccl"
        return CPU_COMMUNICATOR if len({self._hosts[w] for w in workers}) == 1 else "gloo"

    def _process_group(self, name: str, rank: int, size: int) -> Communicator:
        assert self._store is not None
        return ProcessGroupCommunicator(
            dist.PrefixStore(name, self._store),
            rank=rank,
            size=size,
            device=self._device,
            timeout=self._timeout,
            interface_address=self._address,
        )
