"""Ranks of a communicator in processes or threads, and what they do in processes of their own.

Apart from the tests, so that a new process imports no more than it needs.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore

from longtail.core.errors import PeerLost
from longtail.engine import meeting, shm
from longtail.engine.comm import ProcessGroupCommunicator
from longtail.engine.exchange import Volumes
from longtail.engine.jit import jit
from longtail.engine.shm import SPINS, ShmCommunicator, arrive, wait

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "longtail.engine.shm"])
TIMEOUT = timedelta(seconds=120)


def connect(kind: str, folder: Path, rank: int, size: int, timeout: timedelta = TIMEOUT):
    folder.mkdir(exist_ok=True)
    if kind == "shm":
        return ShmCommunicator(folder / "group", rank=rank, size=size, timeout=timeout)
    store = FileStore(str(folder / "store"), size)
    return ProcessGroupCommunicator(store, rank=rank, size=size, timeout=timeout, interface_address="127.0.0.1")


def in_processes(target, kind: str, size: int, folder: Path, *, present: int | None = None) -> tuple[list, list]:
    """``target(comm, rank)`` in new processes for the first ``present`` of ``size`` ranks (default: all of them).

    Returns what each returned (or raised, as text), and exit codes. A ``target.before(rank)`` runs before the group
    meets.
    """
    present = size if present is None else present
    results = PROCESSES.SimpleQueue()
    processes = [
        PROCESSES.Process(target=_process, args=(target, kind, folder, rank, size, results)) for rank in range(present)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(240)
    found = {}
    while not results.empty():
        rank, value = results.get()
        found[rank] = value
    return [found.get(rank) for rank in range(present)], [p.exitcode for p in processes]


def _process(target, kind: str, folder: Path, rank: int, size: int, results) -> None:
    torch.set_num_threads(1)
    try:
        getattr(target, "before", lambda rank: None)(rank)
        results.put((rank, target(connect(kind, folder, rank, size), rank)))
    except PeerLost as error:
        results.put((rank, f"PeerLost: {error}"))


def in_threads(target, size: int) -> list:
    """``target(rank)`` in ``size`` threads; what each returned or raised."""
    results: list = [None] * size

    def work(rank: int) -> None:
        try:
            results[rank] = target(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def returned(results: list) -> list:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


# What ranks do


def sum_and_gather(comm, rank: int):
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    comm.all_reduce_sum(values)
    bounds = [(0, 5), (5, 5), (5, 12)]
    flat = torch.full((12,), -1, dtype=torch.bfloat16)
    flat[slice(*bounds[rank])] = rank
    comm.all_gather_shards(flat, bounds)
    out = [[torch.full((300_000 + rank + peer,), 10 * rank + peer)] if peer != rank else [] for peer in range(3)]
    into = [[torch.zeros(300_000 + rank + peer, dtype=torch.int64)] if peer != rank else [] for peer in range(3)]
    comm.exchange(out, into)
    assert all((t == 10 * peer + rank).all() for peer in range(3) for t in into[peer])
    comm.barrier()
    comm.close()
    comm.close()
    expected = sum(torch.randn(100_003, generator=torch.Generator().manual_seed(r)) for r in range(3))
    torch.testing.assert_close(values, expected)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest(), flat.tolist()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_a_sum(comm, rank: int):
    if rank == 1:
        die()
    comm.all_reduce_sum(torch.zeros(1_000_000))


def die_before_a_barrier(comm, rank: int):
    if rank == 1:
        die()
    comm.barrier()


def die_in_an_exchange(comm, rank: int):
    if rank == 1:
        cuts, calls = Volumes.cuts, []

        def cuts_until_death(volumes, *args):
            calls.append(args)
            if len(calls) == 20:
                die()
            return cuts(volumes, *args)

        Volumes.cuts = cuts_until_death
    parts = [[torch.ones(10_000_000)] if peer != rank else [] for peer in range(3)]
    comm.exchange(parts, [[torch.empty_like(t) for t in part] for part in parts])


def die_before_an_allocation(comm, rank: int):
    if rank == 0:
        die()
    comm.allocate(1000)


class DieMeeting:
    """Rank ``rank`` dies when it calls ``function`` of ``meeting.py``."""

    def __init__(self, rank: int, function: str) -> None:
        self.rank, self.function = rank, function

    def before(self, rank: int) -> None:
        if rank == self.rank:
            setattr(meeting, self.function, lambda *args: die())

    def __call__(self, comm, rank: int) -> str:
        return "met"


class DieWithMemory:
    """All ranks die; ``folder`` stands for ``/dev/shm``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before(self, rank: int) -> None:
        shm.SHARED_MEMORY = self.folder

    def __call__(self, comm, rank: int) -> None:
        comm.allocate(10_000)[:] = 1
        die()


class DieAndLeaveAChild:
    """Rank 1 dies; its child lives on until rank 0 has noticed."""

    def __init__(self, noticed: Path) -> None:
        self.noticed = noticed

    def __call__(self, comm, rank: int) -> None:
        if rank == 1:
            if os.fork() == 0:
                deadline = time.monotonic() + 50
                while time.monotonic() < deadline and not self.noticed.exists():
                    time.sleep(0.01)
                os._exit(0)
            die()
        try:
            comm.barrier()
        finally:
            self.noticed.touch()


@jit
def barriers_that_see_everything(control, shared, rank, size, rounds):
    """Write, meet, read what the others wrote, meet again, and so on; how many reads were stale."""
    stale = 0
    for i in range(rounds):
        shared[rank * 16] = i
        arrive(control, rank)
        while not wait(control, rank, size, SPINS):
            pass
        for peer in range(size):
            stale += shared[peer * 16] != i
        arrive(control, rank)
        while not wait(control, rank, size, SPINS):
            pass
    return stale


def barriers_in_kernels_and_python(comm, rank: int):
    shared = comm.allocate(comm.size * 16 * 8).view(torch.int64).numpy()
    stale = 0
    for i in range(5):
        stale += barriers_that_see_everything(comm._control, shared, rank, comm.size, 200)
        shared[rank * 16] = -i
        comm.barrier()
        stale += int((shared[::16] != -i).sum())
        comm.barrier()
    return stale
