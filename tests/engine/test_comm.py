"""All communicators alike, in processes and in threads: values, bits, and what the others see when one is lost."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from engine.process_ranks import (
    TIMEOUT,
    connect,
    die_before_a_barrier,
    die_before_a_sum,
    die_in_an_exchange,
    in_processes,
    in_threads,
    returned,
    sum_and_gather,
)
from longtail.core.errors import PeerLost
from longtail.engine import comm, shm
from longtail.engine.comm import LocalCommunicator, ProcessGroupCommunicator
from longtail.engine.shm import ShmCommunicator

KINDS = ("gloo", "shm")

every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def group_of(kind: str, size: int) -> list:
    """Communicators for many tests: threads may take turns with them."""
    store, path = HashStore(), Path(tempfile.gettempdir()) / f"test-{os.getpid()}-{size}"

    def work(rank: int):
        if kind == "shm":
            return ShmCommunicator(path, rank=rank, size=size, timeout=TIMEOUT)
        return ProcessGroupCommunicator(store, rank=rank, size=size, timeout=TIMEOUT, interface_address="127.0.0.1")

    return returned(in_threads(work, size))


@pytest.fixture(params=[(kind, size) for kind in KINDS for size in (2, 3, 4)], ids=lambda p: f"{p[0]}-{p[1]}")
def group(request) -> list:
    return group_of(*request.param)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that little data takes many pieces (but not in other processes)."""
    monkeypatch.setattr(comm, "_PIECE", 64)
    monkeypatch.setattr(shm, "PIECE", 64)
    monkeypatch.setattr(shm, "_SMALL", 32)


def everywhere(group: list, target) -> list:
    """``target(comm)`` on all ranks at once."""
    return returned(in_threads(lambda rank: target(group[rank]), len(group)))


def random_of(dtype: torch.dtype, n: int, *seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(size=n) * 100
    return torch.from_numpy(values).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, 333])
def test_the_sum_over_ranks_is_the_same_on_every_rank(group, dtype, n):
    def work(comm):
        tensor = random_of(dtype, n, comm.rank)
        comm.all_reduce_sum(tensor)
        return tensor

    sums = everywhere(group, work)
    exact = sum(random_of(dtype, n, rank).double() for rank in range(len(group)))
    torch.testing.assert_close(sums[0], exact.to(dtype), rtol=0, atol=5 if dtype == torch.bfloat16 else 1e-3)
    assert all(torch.equal(other, sums[0]) for other in sums)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shared_memory_adds_in_the_order_of_ranks(size):
    def work(comm):
        tensors = [random_of(dtype, 333, comm.rank).view(3, 111) for dtype in (torch.float32, torch.bfloat16)]
        for tensor in tensors:
            comm.all_reduce_sum(tensor)
        return tensors

    for got, dtype in zip(everywhere(group_of("shm", size), work)[0], (torch.float32, torch.bfloat16), strict=True):
        total = np.zeros(333, np.float32)
        for rank in range(size):
            total += random_of(dtype, 333, rank).float().numpy()
        assert torch.equal(got.view(-1), torch.from_numpy(total).to(dtype))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_all_shards(kind, data, dtype):
    group = group_of(kind, data.draw(st.integers(2, 4), label="size"))
    sizes = data.draw(st.lists(st.integers(0, 70), min_size=len(group), max_size=len(group)), label="sizes")
    ends = np.cumsum([3, *sizes]).tolist()
    bounds = list(itertools.pairwise(ends))
    whole = random_of(dtype, ends[-1] + 2, 7)

    def work(comm):
        flat = torch.zeros_like(whole)
        flat[slice(*bounds[comm.rank])] = whole[slice(*bounds[comm.rank])]
        comm.all_gather_shards(flat, bounds)
        return flat

    expected = torch.zeros_like(whole)
    expected[3 : ends[-1]] = whole[3 : ends[-1]]
    assert all(torch.equal(flat, expected) for flat in everywhere(group, work))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_any_lengths_reach_every_rank(kind, data):
    group = group_of(kind, data.draw(st.integers(2, 4), label="size"))
    given_ = data.draw(st.lists(st.binary(max_size=300), min_size=len(group), max_size=len(group)))
    assert everywhere(group, lambda comm: comm.all_gather_bytes(given_[comm.rank])) == [given_] * len(group)


DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
messages = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(DTYPES)), max_size=5)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exchanged_arrives_whatever_the_sizes(kind, data):
    size = data.draw(st.integers(2, 4), label="size")
    shapes = [[[] if i == j else data.draw(messages) for j in range(size)] for i in range(size)]

    def sent(i: int, j: int) -> list[torch.Tensor]:
        return [random_of(dtype, n, i, j, k) for k, (n, dtype) in enumerate(shapes[i][j])]

    def work(comm):
        me = comm.rank
        into = [[torch.full_like(t, 9) for t in sent(peer, me)] for peer in range(size)]
        comm.exchange([sent(me, peer) for peer in range(size)], into)
        return into

    for me, into in enumerate(everywhere(group_of(kind, size), work)):
        for peer in range(size):
            assert all(torch.equal(got, t) for got, t in zip(into[peer], sent(peer, me), strict=True))


def test_all_ranks_refuse_an_exchange_that_does_not_fit_together_and_go_on(group):
    def work(comm):
        one, none = [torch.ones(3)], []
        out = [one if comm.rank == 1 and peer == 0 else none for peer in range(comm.size)]
        with pytest.raises(ValueError, match="rank 1 has 12 bytes for rank 0, which expects 0"):
            comm.exchange(out, [none] * comm.size)
        to_itself = [one if peer == comm.rank == 1 else none for peer in range(comm.size)]
        with pytest.raises(ValueError, match="rank 1 sends to itself"):
            comm.exchange(to_itself, to_itself)
        with pytest.raises(ValueError, match="for each of them"):
            comm.exchange([none], [none])
        with pytest.raises(ValueError, match="contiguous"):
            comm.exchange([[torch.ones(2, 2).T]] * comm.size, [none] * comm.size)
        comm.barrier()

    everywhere(group, work)


@every_kind
def test_three_processes_see_the_same_bits_of_the_sum_and_all_shards(kind, tmp_path):
    results, codes = in_processes(sum_and_gather, kind, 3, tmp_path)
    assert codes == [0, 0, 0]
    sums, gathered = zip(*results, strict=True)
    assert sums[0] == sums[1] == sums[2]
    assert list(gathered) == [[0.0] * 5 + [2.0] * 7] * 3


@every_kind
@pytest.mark.parametrize("target", [die_before_a_sum, die_before_a_barrier, die_in_an_exchange])
def test_a_killed_peer_raises_peer_lost_on_the_others_long_before_the_time_out(kind, target, tmp_path):
    results, codes = in_processes(target, kind, 3, tmp_path)
    assert codes == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        assert results[rank].startswith(f"PeerLost: rank {rank} of 3 lost a peer")
        assert not any(word in results[rank].split("lost a peer")[1].lower() for word in ("time", "within"))


@every_kind
def test_a_new_generation_replaces_one_whose_peer_left(kind, tmp_path):
    def work(rank: int):
        first = connect(kind, tmp_path / "1", rank, 2)
        if rank == 1:
            first.close()
        else:
            with pytest.raises(PeerLost):
                first.all_reduce_sum(torch.ones(3))
            with pytest.raises(PeerLost, match="no longer connected"):
                first.barrier()
        second = connect(kind, tmp_path / "2", rank, 2)
        value = torch.tensor([rank + 1.0])
        second.all_reduce_sum(value)
        second.close()
        return value.item()

    assert in_threads(work, 2) == [3.0, 3.0]


def shorten(comm, seconds: float) -> None:
    """The time-out of what is done from now on."""
    if isinstance(comm, ShmCommunicator):
        comm._timeout_s = seconds
    else:
        comm._group._set_default_timeout(timedelta(seconds=seconds))


@every_kind
def test_a_silent_peer_is_lost_after_the_time_out(kind, tmp_path):
    left = threading.Event()

    def work(rank: int):
        try:
            comm = connect(kind, tmp_path, rank, 2)
            if rank == 1:
                shorten(comm, 1.0)
                comm.all_reduce_sum(torch.ones(3))
            left.wait()
        finally:
            left.set()

    assert isinstance(in_threads(work, 2)[1], PeerLost)


@every_kind
@pytest.mark.parametrize("rank", [0, 1])
def test_peers_that_never_come_are_lost_after_the_time_out(kind, rank, tmp_path):
    with pytest.raises(PeerLost, match="did not meet"):
        connect(kind, tmp_path, rank, 2, timedelta(seconds=1))


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


def alone(kind: str, tmp_path: Path):
    return LocalCommunicator() if kind == "local" else connect(kind, tmp_path, 0, 1)


@pytest.mark.parametrize("kind", ["local", *KINDS])
def test_a_single_worker_needs_nobody(kind, tmp_path):
    comm, value = alone(kind, tmp_path), torch.ones(2)
    assert (comm.kind, comm.rank, comm.size) == (kind, 0, 1)
    comm.all_reduce_sum(value)
    comm.all_gather_shards(value, [(0, 2)])
    assert comm.all_gather_bytes(b"one") == [b"one"]
    comm.exchange([[]], [[]])
    comm.barrier()
    comm.close()
    assert value.tolist() == [1.0, 1.0]
