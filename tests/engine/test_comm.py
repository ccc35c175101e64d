"""Real processes on gloo: values, bits, and what the others see when one dies."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore

from longtail.core.errors import PeerLost
from longtail.engine.comm import LocalCommunicator, ProcessGroupCommunicator

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "longtail.engine.comm"])
TIMEOUT = timedelta(seconds=30)


def in_processes(target, size: int, path: Path) -> tuple[list, list[int | None]]:
    """``target(comm, rank)`` in ``size`` new processes; what each returned (or raised, as text), and exit codes."""
    results = PROCESSES.SimpleQueue()
    processes = [
        PROCESSES.Process(target=_process, args=(target, rank, size, str(path), results)) for rank in range(size)
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
    codes = [p.exitcode for p in processes]
    found = {}
    while not results.empty():
        rank, value = results.get()
        found[rank] = value
    return [found.get(rank) for rank in range(size)], codes


def _process(target, rank: int, size: int, path: str, results) -> None:
    torch.set_num_threads(1)
    comm = ProcessGroupCommunicator(FileStore(path, size), rank=rank, size=size, timeout=TIMEOUT)
    try:
        results.put((rank, target(comm, rank)))
    except PeerLost as error:
        results.put((rank, f"PeerLost: {error}"))


def sum_and_gather(comm, rank: int):
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    comm.all_reduce_sum(values)
    bounds = [(0, 5), (5, 5), (5, 12)]
    flat = torch.full((12,), -1, dtype=torch.bfloat16)
    flat[slice(*bounds[rank])] = rank
    comm.all_gather_shards(flat, bounds)
    comm.barrier()
    comm.close()
    comm.close()
    expected = sum(torch.randn(100_003, generator=torch.Generator().manual_seed(r)) for r in range(3))
    torch.testing.assert_close(values, expected)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest(), flat.tolist()


def test_three_processes_see_the_same_bits_of_the_sum_and_all_shards(tmp_path):
    results, codes = in_processes(sum_and_gather, 3, tmp_path / "store")
    assert codes == [0, 0, 0]
    sums, gathered = zip(*results, strict=True)
    assert sums[0] == sums[1] == sums[2]
    assert list(gathered) == [[0.0] * 5 + [2.0] * 7] * 3


def die_in_the_middle(comm, rank: int):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce_sum(torch.zeros(1_000_000))
    return "no error"


def test_a_killed_peer_raises_peer_lost_on_the_others_long_before_the_time_out(tmp_path):
    results, codes = in_processes(die_in_the_middle, 3, tmp_path / "store")
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert results[rank].startswith(f"PeerLost: rank {rank} of 3 lost a peer")
        assert "time" not in results[rank].lower().split("lost a peer")[1]


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


def test_a_new_generation_replaces_one_whose_peer_left():
    store = HashStore()
    short = timedelta(seconds=1)

    def work(rank: int):
        first = ProcessGroupCommunicator(PrefixStore("1", store), rank=rank, size=2, timeout=short)
        if rank == 1:
            first.close()
        else:
            with pytest.raises(PeerLost):
                first.all_reduce_sum(torch.ones(3))
            with pytest.raises(PeerLost, match="no longer connected"):
                first.barrier()
        second = ProcessGroupCommunicator(PrefixStore("2", store), rank=rank, size=2, timeout=TIMEOUT)
        value = torch.tensor([rank + 1.0])
        second.all_reduce_sum(value)
        second.close()
        return value.item()

    assert in_threads(work, 2) == [3.0, 3.0]


def test_a_silent_peer_is_lost_after_the_time_out():
    store, left = HashStore(), threading.Event()

    def work(rank: int):
        comm = ProcessGroupCommunicator(store, rank=rank, size=2, timeout=timedelta(seconds=1))
        if rank == 0:
            left.wait()
            return None
        try:
            comm.all_reduce_sum(torch.ones(3))
        finally:
            left.set()

    assert isinstance(in_threads(work, 2)[1], PeerLost)


def test_peers_that_never_come_are_lost_after_the_time_out():
    with pytest.raises(PeerLost, match="did not meet"):
        ProcessGroupCommunicator(HashStore(), rank=0, size=2, timeout=timedelta(seconds=1))


def test_one_process_holds_several_communicators_of_different_sizes():
    store = HashStore()

    def work(rank: int):
        wide = ProcessGroupCommunicator(PrefixStore("wide", store), rank=rank, size=3)
        pair = ProcessGroupCommunicator(PrefixStore("pair", store), rank=rank, size=2) if rank < 2 else None
        value = torch.ones(1)
        if pair:
            pair.all_reduce_sum(value)
        wide.all_reduce_sum(value)
        return value.item()

    assert in_threads(work, 3) == [5.0, 5.0, 5.0]


def test_a_single_worker_needs_nobody():
    comm, value = LocalCommunicator(), torch.ones(2)
    comm.all_reduce_sum(value)
    comm.all_gather_shards(value, [(0, 2)])
    comm.barrier()
    comm.close()
    assert value.tolist() == [1.0, 1.0]
