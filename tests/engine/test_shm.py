"""Shared memory between ranks: the barrier in Python and in kernels, memory, meetings, and what a death leaves."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import carray

from engine.process_ranks import (
    DieAndLeaveAChild,
    DieMeeting,
    DieWithMemory,
    barriers_in_kernels_and_python,
    connect,
    die_before_an_allocation,
    in_processes,
    in_threads,
    returned,
    sum_and_gather,
)
from longtail.core.errors import CapacityError, PeerLost
from longtail.engine import meeting, shm
from longtail.engine.jit import callback
from longtail.engine.shm import CONTROL_WORDS, STRIDE, ShmCommunicator, arrive, wait
from longtail.engine.simd import as_pointer
from longtail.engine.team import Kernel, words


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The folder that stands for ``/dev/shm``."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(shm, "SHARED_MEMORY", folder)
    return folder


def group(folder, size: int, target, timeout: timedelta = timedelta(seconds=30)) -> list:
    """``target(comm)`` of ``size`` ranks in threads; what each returned or raised."""

    def work(rank: int):
        comm = connect("shm", folder, rank, size, timeout)
        try:
            return target(comm)
        finally:
            comm.close()

    return in_threads(work, size)


@pytest.mark.parametrize("size", [2, 4])
def test_whoever_passes_a_barrier_sees_what_all_wrote_before_it(size, tmp_path):
    def work(comm):
        return barriers_in_kernels_and_python(comm, comm.rank)

    assert group(tmp_path, size, work) == [0] * size


def test_processes_pass_barriers_of_kernels_and_of_python_alike(tmp_path):
    results, codes = in_processes(barriers_in_kernels_and_python, "shm", 3, tmp_path)
    assert (results, codes) == ([0, 0, 0], [0, 0, 0])


def test_a_wait_that_gave_up_goes_on_without_arriving_again():
    control = np.zeros(CONTROL_WORDS, np.int64)
    arrive(control, 0)
    assert not wait(control, 0, 3, 10)
    arrive(control, 1)
    assert not wait(control, 0, 3, 10)
    arrive(control, 2)
    assert wait(control, 0, 3, 10)
    assert [wait(control, rank, 3, 10) for rank in (1, 2)] == [True, True]
    assert control[: 3 * STRIDE : STRIDE].tolist() == [1, 1, 1]


def test_a_rank_that_is_a_barrier_ahead_holds_nobody_up():
    control = np.zeros(CONTROL_WORDS, np.int64)
    for rank in (0, 1, 1):
        arrive(control, rank)
    assert wait(control, 0, 2, 10)
    assert not wait(control, 1, 2, 10)


def test_a_kernel_waits_at_the_control_address_and_python_goes_on_where_it_gave_up(tmp_path):
    @callback
    def meet_in_kernel(pointer):
        args = carray(pointer, 5, np.int64)
        control = carray(as_pointer(args[0]), CONTROL_WORDS, np.int64)
        if args[3]:
            arrive(control, args[1])
        args[4] = wait(control, args[1], args[2], 100)

    kernel, gave_up = Kernel(meet_in_kernel), threading.Event()

    def work(comm):
        args = words(5)(comm.control_address, comm.rank, comm.size, 1)
        if comm.rank == 1:
            gave_up.wait()
            comm.barrier()
            return None
        kernel.run(args, 1)
        first = args[4]
        gave_up.set()
        comm.check()
        args[3] = 0
        kernel.run(args, 1)
        return first, args[4]

    assert group(tmp_path, 2, work) == [(0, 1), None]


def test_allocated_memory_is_shared_and_zero_and_outlives_the_communicator(memory, tmp_path):
    def work(comm):
        empty, tensor = comm.allocate(0), comm.allocate(100_000)
        assert len(empty) == 0
        assert tensor.dtype == torch.uint8
        assert tensor.data_ptr() % 4096 == 0
        assert not tensor.any()
        comm.barrier()
        tensor[comm.rank * 1000 :][:1000] = comm.rank + 1
        comm.barrier()
        comm.close()
        return tensor

    tensors = returned(group(tmp_path, 3, work))
    assert [t.view(-1, 1000)[:4, 0].tolist() for t in tensors] == [[1, 2, 3, 0]] * 3


def test_memory_that_no_folder_has_room_for_is_refused_on_every_rank_alike(tmp_path):
    def work(comm):
        with pytest.raises(
            CapacityError, match=r"no room for 1,125,899,906,842,624 bytes .*/dev/shm has .*; make room"
        ):
            comm.allocate(1 << 50)
        comm.barrier()
        return comm.allocate(10).tolist()

    assert group(tmp_path, 3, work) == [[0] * 10] * 3


def test_a_rank_that_cannot_map_its_part_makes_all_refuse(tmp_path, monkeypatch):
    mapped = shm.mmap.mmap
    unlucky = threading.local()

    def fail(fd, nbytes):
        if getattr(unlucky, "here", False):
            raise OSError("out of address space")
        return mapped(fd, nbytes)

    def work(comm):
        unlucky.here = comm.rank == 1
        with pytest.raises(CapacityError, match=r"rank 1 cannot map 1,000 bytes .*out of address space"):
            comm.allocate(1000)
        unlucky.here = False
        return len(comm.allocate(1000))

    monkeypatch.setattr(shm.mmap, "mmap", fail)
    assert group(tmp_path, 3, work) == [1000] * 3


def test_ranks_that_allocate_differently_are_told(tmp_path):
    def work(comm):
        with pytest.raises(ValueError, match=r"want \[10, 11\] bytes"):
            comm.allocate(10 + comm.rank)

    returned(group(tmp_path, 2, work))


def test_memory_comes_from_the_folder_of_the_path_where_shared_memory_has_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "SHARED_MEMORY", tmp_path / "missing")

    def work(comm):
        tensor = comm.allocate(5)
        tensor[comm.rank] = 1
        comm.barrier()
        return tensor.tolist(), os.listdir(tmp_path)

    assert group(tmp_path, 2, work) == [([1, 1, 0, 0, 0], [])] * 2


def test_a_group_that_finds_no_memory_at_all_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "PIECE", 1 << 50)
    results = group(tmp_path, 2, lambda comm: None)
    assert all(isinstance(error, CapacityError) for error in results)
    assert str(results[0]) == str(results[1])


def test_no_file_is_left_and_none_is_there_while_the_group_lives(memory, tmp_path):
    def work(comm):
        comm.allocate(1000)
        comm.barrier()
        seen = os.listdir(memory), os.listdir(comm._path.parent)
        comm.barrier()
        return seen

    assert group(tmp_path / "folder", 3, work) == [([], [])] * 3
    assert os.listdir(memory) == os.listdir(tmp_path / "folder") == []


def test_ranks_that_are_all_killed_leave_no_file_and_the_next_group_meets_at_the_same_place(memory, tmp_path):
    assert in_processes(DieWithMemory(memory), "shm", 3, tmp_path)[1] == [-signal.SIGKILL] * 3
    assert os.listdir(memory) == []
    (tmp_path / "group").write_text("left by something else")
    assert in_processes(sum_and_gather, "shm", 3, tmp_path)[1] == [0] * 3
    assert sorted(os.listdir(tmp_path)) == ["group", "shm"]


@pytest.mark.parametrize(
    ("rank", "function", "others"), [(1, "_receive", [0]), (0, "_hand_out_pipes", [1, 2]), (2, "Peers", [0, 1])]
)
def test_a_rank_that_dies_while_the_group_meets_is_noticed_at_once(rank, function, others, tmp_path):
    present = 2 if rank == 1 else 3  # rank 2 stays away: the group is still meeting when rank 1 dies
    results, codes = in_processes(DieMeeting(rank, function), "shm", 3, tmp_path, present=present)
    assert codes[rank] == -signal.SIGKILL
    for other in others:
        lost = results[other].split("PeerLost")[1].split(f"rank {other} of 3")[1]
        # Rank 0 may have given up by then, too.
        assert f"rank {rank} " in lost or (other != 0 and "rank 0 has" in lost)
        assert "in time" not in results[other]


def test_a_rank_that_dies_before_memory_is_allocated_is_noticed(tmp_path):
    results, codes = in_processes(die_before_an_allocation, "shm", 3, tmp_path)
    assert codes == [-signal.SIGKILL, 0, 0]
    assert all("lost a peer: rank" in result for result in results[1:])


def test_a_child_of_a_dead_rank_does_not_keep_it_alive(tmp_path):
    results, codes = in_processes(DieAndLeaveAChild(tmp_path / "noticed"), "shm", 2, tmp_path)
    assert codes == [0, -signal.SIGKILL]
    assert results[0] == "PeerLost: rank 0 of 2 lost a peer: rank 1 has died"


def test_a_forked_child_that_closes_does_not_close_for_its_parent(tmp_path):
    def work(comm):
        comm.barrier()
        if comm.rank == 0 and (child := os.fork()) == 0:
            comm.close()
            os._exit(0)
        if comm.rank == 0:
            os.waitpid(child, 0)
        comm.barrier()

    returned(group(tmp_path, 2, work))


def test_those_who_wait_learn_at_once_that_a_peer_has_closed_and_all_give_up(tmp_path):
    def work(comm):
        if comm.rank == 1:
            return None
        with pytest.raises(PeerLost, match=r"rank \d of 3 lost a peer: rank \d has closed its end"):
            comm.barrier()
        with pytest.raises(PeerLost, match="no longer connected"):
            comm.all_gather_bytes(b"")
        with pytest.raises(PeerLost, match="no longer connected"):
            comm.allocate(1)

    returned(group(tmp_path, 3, work))


def test_a_peer_that_closes_after_the_last_barrier_harms_nobody(tmp_path):
    def work(comm):
        for _ in range(50):
            comm.all_gather_bytes(bytes(comm.rank))

    for _ in range(10):
        returned(group(tmp_path, 3, work))


def test_a_forgotten_communicator_is_closed(tmp_path):
    def work(rank: int):
        comm = connect("shm", tmp_path, rank, 2)
        if rank == 0:
            with pytest.raises(PeerLost, match="rank 1 has died"):
                comm.barrier()

    returned(in_threads(work, 2))


def test_those_who_did_not_come_are_named(tmp_path, monkeypatch):
    greeted, greet = threading.Event(), meeting._greet

    def greeting(*args):
        greet(*args)
        greeted.set()

    def work(rank: int):
        connect("shm", tmp_path, [0, 2][rank], 4)

    later = SimpleNamespace(monotonic=lambda: 1e6 * greeted.is_set(), sleep=time.sleep)
    monkeypatch.setattr(meeting, "_greet", greeting)
    monkeypatch.setattr(meeting, "time", later)
    for error in in_threads(work, 2):
        assert isinstance(error, PeerLost)
        assert "ranks 1, 3 did not come in time" in str(error)
    with pytest.raises(PeerLost, match=r"rank 2 of 3 did not meet its peers at .*/group: rank 0 did not come in time"):
        connect("shm", tmp_path, 2, 3, timedelta(0))


def test_ranks_that_disagree_on_the_group_are_refused_and_the_others_meet(tmp_path):
    waiting = threading.Event()

    def work(i: int):
        if i < 2:
            comm = connect("shm", tmp_path, i, 2) if i == 0 or waiting.wait() else None
            comm.barrier()
            return comm.close()
        try:
            with pytest.raises(PeerLost, match="rank 0 expects 2 ranks"):
                connect("shm", tmp_path, 2, 3)
        finally:
            waiting.set()

    returned(in_threads(work, 3))


def test_the_same_place_serves_a_second_group_while_the_first_lives(tmp_path):
    def work(rank: int):
        first = connect("shm", tmp_path, rank, 2)
        second = connect("shm", tmp_path, rank, 2)
        given = first.all_gather_bytes(b"first"), second.all_gather_bytes(b"second")
        first.close()
        second.close()
        return given

    assert in_threads(work, 2) == [([b"first"] * 2, [b"second"] * 2)] * 2


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 65)])
def test_impossible_ranks_are_refused(rank, size, tmp_path):
    with pytest.raises(ValueError, match="1 to 64 ranks"):
        ShmCommunicator(tmp_path / "group", rank=rank, size=size)
