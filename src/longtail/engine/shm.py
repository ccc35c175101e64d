"""Collectives over shared memory, between ranks on one host (Linux), and the barrier that kernels call themselves.

``arrive`` and ``wait`` are one barrier: each rank counts its arrivals in a word of its own, and has passed when no
peer's count is behind its own. The counts are the only state, so barriers of Python and of kernels mix freely, and a
wait that was given up is resumed by waiting again.

Data goes through a small staging area: each rank has two halves, which it writes in turn. A rank that has passed the
barrier of a round has read all of the round before, so one barrier a round keeps writers from overtaking readers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from numba import types
from torch import Tensor

from longtail.core.errors import CapacityError, PeerLost
from longtail.engine.exchange import ByteStream, Volumes
from longtail.engine.jit import compiled_before, jit, note_compiled, one_process
from longtail.engine.meeting import Peers, meet
from longtail.engine.simd import atomic_load, fetch_add, monotonic_ns

MAX_RANKS = 64
STRIDE = 16
"""Words between the counts of two ranks: two cache lines, since a read fetches its neighbour too."""
CONTROL_WORDS = MAX_RANKS * STRIDE
"""Length of the int64 array at ``ShmCommunicator.control_address``."""
SPINS = 2000
"""Polls before ``wait`` begins to give its core away: some microseconds."""
BUDGET_NS = 20_000_000
"""How long ``wait`` polls in all."""
_CLOSED = 1
"""The word after a rank's count: whether it has closed its end."""
PIECE = 2 * 1024 * 1024
"""Bytes of a half of a rank's staging."""
_SMALL = 32 * 1024
"""Up to this many bytes every rank adds up everything, which takes one barrier instead of two."""
_NUMPY = {getattr(torch, name): np.dtype(name) for name in ("float32", "float64", "int32", "int64")}
SHARED_MEMORY = Path("/dev/shm")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 50e-6, 1e-3

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@jit
def arrive(control, rank):
    """Come to the next barrier: all that this thread has written so far is seen by whoever passes it.

    ``control`` is the int64 array ``[CONTROL_WORDS]`` at ``control_address``. Once per rank and barrier.
    """
    return fetch_add(control, rank * STRIDE, 1) + 1


@jit
def wait(control, rank, size, spins):
    """Whether all ``size`` ranks have come to the barrier that ``rank`` arrived at last; False after ``BUDGET_NS``.

    Then call ``ShmCommunicator.check`` from Python, and wait again (without arriving). Any number of a rank's threads
    may wait. After ``spins`` polls (``SPINS``) it gives its core away between two polls.
    """
    mine = atomic_load(control, rank * STRIDE)
    polls, give_up = 0, 0
    for peer in range(size):
        if peer == rank:
            continue
        while atomic_load(control, peer * STRIDE) < mine:
            polls += 1
            if polls > spins:
                now = monotonic_ns()
                if give_up == 0:
                    give_up = now + BUDGET_NS
                elif now > give_up:
                    return False
                _sched_yield()
    return True


class ShmCommunicator:
    """Collectives over shared memory (see :class:`longtail.core.comm.Communicator`); CPU tensors only.

    All ``size`` ranks, processes or threads of one host, construct it with the same ``path``: a name that no other
    group uses meanwhile, in a folder that all of them see. No file of that name is made. Memory comes from
    ``/dev/shm`` where it has room, else from an unnamed file in the folder of ``path``; either way nothing is left
    behind, not even by ranks that are killed. ``timeout`` bounds each wait for a peer, ``meet_timeout`` (by default
    the same) the construction, in which nobody knows yet whether a peer lives; it ends when ``called_off``, too.

    Raises :class:`PeerLost` (from any method) when a peer has died, has closed its end or is not heard of for
    ``timeout``, and :class:`CapacityError` where memory does not suffice.
    """

    kind = "shm"

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(seconds=60),
        meet_timeout: timedelta | None = None,
        called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        if not 0 <= rank < size <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {size}: there are 1 to {MAX_RANKS} ranks")
        self.rank, self.size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._owner = os.getpid()
        self._peers: Peers | None = None
        self._path = Path(path).absolute()
        self._round = 0
        self._scratch = torch.empty(0, dtype=torch.uint8)
        prepare()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        until = self._timeout_s if meet_timeout is None else meet_timeout.total_seconds()
        self._peers = meet(self._path, rank=rank, size=size, timeout_s=until, called_off=called_off)
        try:
            control_bytes = CONTROL_WORDS * 8
            region = self._map(control_bytes + 2 * size * PIECE)
            self._control: np.ndarray = region[:control_bytes].view(torch.int64).numpy()
            self._staging = region[control_bytes:].view(2, size, PIECE).numpy()
            self.barrier()
        except BaseException:
            self.close()
            raise

    @property
    def control_address(self) -> int:
        """Of the ``CONTROL_WORDS`` int64 for ``arrive`` and ``wait``; valid as long as this object lives."""
        return self._control.ctypes.data

    def allocate(self, nbytes: int) -> Tensor:
        """``[nbytes]`` uint8, zeros, at a page boundary: the same memory on every rank. It outlives :meth:`close`.

        Collective. Raises :class:`CapacityError` on every rank alike where one of them cannot have it.
        """
        memory, failure = None, ""
        try:
            memory = self._map(nbytes)
        except CapacityError as error:
            failure = str(error)
        outcomes = [json.loads(text) for text in self.all_gather_bytes(json.dumps([nbytes, failure]).encode())]
        if any(wanted != nbytes for wanted, _ in outcomes):
            raise ValueError(f"ranks allocate together but want {[wanted for wanted, _ in outcomes]} bytes")
        if memory is None or any(text for _, text in outcomes):
            raise CapacityError(next(text for _, text in outcomes if text))
        return memory

    def scratch(self, nbytes: int) -> Tensor:
        """As :meth:`allocate`, but the same memory each time, larger if need be: for what no caller needs any longer
        when the next one asks. Its contents are anything."""
        if len(self._scratch) < nbytes:
            self._scratch = self.allocate(nbytes)
        return self._scratch[:nbytes]

    def barrier(self) -> None:
        self._require_open()
        arrive(self._control, self.rank)
        while not wait(self._control, self.rank, self.size, SPINS):
            self.check()

    def check(self) -> None:
        """Go on waiting where ``wait`` gave up, asleep, until all peers have arrived; then ``wait`` returns True.

        Raises :class:`PeerLost` when one that has not arrived is dead or has closed its end (at once), or when nobody
        has arrived anywhere for ``timeout``; the communicator is closed then, so that the others notice too.
        """
        pause_s, since, before = _FIRST_PAUSE_S, time.monotonic(), None
        while True:
            gone = self._require_open().gone()  # before the counts are read: who is gone arrives no more
            counts = self._control[: self.size * STRIDE : STRIDE].tolist()
            late = [peer for peer, count in enumerate(counts) if count < counts[self.rank]]
            if not late:
                return
            if lost := gone.intersection(late):
                closed = {peer for peer in lost if self._control[peer * STRIDE + _CLOSED]}
                peer = min(lost - closed or closed)
                self._fail(f"rank {peer} {'has closed its end' if peer in closed else 'has died'}")
            now = time.monotonic()
            if counts != before:
                since, before = now, counts
            elif now - since > self._timeout_s:
                self._fail(f"rank {late[0]} did not come within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LAST_PAUSE_S)

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sums in the order of ranks; those of 16-bit floats in float32, rounded once."""
        self._require_open()
        if self.size == 1:
            return
        whole, dtype, n = _bytes(tensor), tensor.dtype, tensor.itemsize
        for at in range(0, len(whole), PIECE):
            part = whole[at : at + PIECE]
            slots = [slot[: len(part)] for slot in self._turn()]
            slots[self.rank][:] = part
            self.barrier()
            if len(whole) <= _SMALL:
                part[:] = _sum(slots, dtype)
                continue
            ends = [len(part) // n * rank // self.size * n for rank in range(self.size + 1)]
            mine = slice(ends[self.rank], ends[self.rank + 1])
            slots[self.rank][mine] = _sum([slot[mine] for slot in slots], dtype)  # only read here in between
            self.barrier()
            for rank, slot in enumerate(slots):
                share = slice(ends[rank], ends[rank + 1])
                part[share] = slot[share]

    def all_gather_shards(self, flat: Tensor, bounds: list[tuple[int, int]]) -> None:
        self._require_open()
        if self.size == 1:
            return
        whole, n = _bytes(flat), flat.itemsize
        shards = [whole[start * n : end * n] for start, end in bounds]
        for at in range(0, max(map(len, shards)), PIECE):
            parts = [shard[at : at + PIECE] for shard in shards]
            slots = self._turn()
            slots[self.rank][: len(parts[self.rank])] = parts[self.rank]
            self.barrier()
            for rank, part in enumerate(parts):
                if rank != self.rank:
                    part[:] = slots[rank][: len(part)]

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._require_open()
        mine = np.frombuffer(len(data).to_bytes(8, "little") + data, np.uint8)
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        lengths, at = [0], 0
        while at == 0 or at < max(lengths):  # the first round carries the lengths
            slots, piece = self._turn(), mine[at : at + PIECE]
            slots[self.rank][: len(piece)] = piece
            self.barrier()
            if at == 0:
                lengths = [8 + int.from_bytes(slot[:8].tobytes(), "little") for slot in slots]
            for part, slot, length in zip(parts, slots, lengths, strict=True):
                part.append(slot[: max(0, min(PIECE, length - at))].tobytes())
            at += PIECE
        return [b"".join(part)[8:] for part in parts]

    def exchange(self, out: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]]) -> None:
        self._require_open()
        outgoing, incoming = [ByteStream(t) for t in out], [ByteStream(t) for t in into]
        volumes = Volumes.agree(self, outgoing, incoming)
        for round_ in range(volumes.rounds(PIECE)):
            slots = [torch.from_numpy(slot) for slot in self._turn()]
            for stream, cut in zip(outgoing, volumes.cuts(self.rank, round_, PIECE), strict=True):
                stream.read_into(slots[self.rank][cut.at : cut.at + cut.nbytes])
            self.barrier()
            for sender, stream in enumerate(incoming):
                cut = volumes.cuts(sender, round_, PIECE)[self.rank]
                stream.write_from(slots[sender][cut.at : cut.at + cut.nbytes])

    def close(self) -> None:
        peers, self._peers = self._peers, None
        if peers is None:
            return
        if os.getpid() == self._owner and hasattr(self, "_control"):
            self._control[self.rank * STRIDE + _CLOSED] = 1
        peers.close()

    def _require_open(self) -> Peers:
        if self._peers is None:
            raise PeerLost(f"rank {self.rank} of {self.size} is no longer connected to its peers")
        return self._peers

    def _fail(self, why: str) -> None:
        self.close()
        raise PeerLost(f"rank {self.rank} of {self.size} lost a peer: {why}")

    def _turn(self) -> list[np.ndarray]:
        """The half of each rank's staging whose turn it is, ``[PIECE]`` uint8."""
        self._round += 1
        return list(self._staging[self._round % 2])

    def _map(self, nbytes: int) -> Tensor:
        """Memory that rank 0 reserves and all map. Raises :class:`CapacityError`, without asking the others."""
        peers = self._require_open()
        try:
            if self.rank == 0:
                try:
                    fd = _reserve(max(1, nbytes), (SHARED_MEMORY, self._path.parent))
                except CapacityError as error:
                    peers.give({"no_room": str(error)}, None)
                    raise
                try:
                    peers.give({"nbytes": nbytes}, fd)
                except PeerLost:
                    os.close(fd)
                    raise
            else:
                note, given = peers.take(self._timeout_s)
                if given is None:
                    raise CapacityError(note.get("no_room", "no file descriptor is free: raise `ulimit -n`"))
                fd, nbytes = given, note["nbytes"]
        except PeerLost:
            self.close()
            raise
        try:
            return torch.frombuffer(mmap.mmap(fd, max(1, nbytes)), dtype=torch.uint8)[:nbytes]
        except OSError as error:
            raise CapacityError(f"rank {self.rank} cannot map {nbytes:,} bytes of shared memory: {error}") from error
        finally:
            os.close(fd)


def _reserve(nbytes: int, folders: Sequence[Path]) -> int:
    """A file without a name, with ``nbytes`` zeros that really are there, in the first folder that has room for it."""
    found = []
    for folder in folders:
        try:
            space = os.statvfs(folder)
            free = space.f_bavail * space.f_frsize
            found.append(f"{folder} has {free:,}")
            if free >= nbytes:
                with tempfile.TemporaryFile(dir=folder) as file:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
                    return os.dup(file.fileno())
        except OSError as error:
            found.append(f"{folder}: {error.strerror}")
    raise CapacityError(f"no room for {nbytes:,} bytes of shared memory: {', '.join(found)}; make room in one of them.")


def _bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor, uint8."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _sum(parts: Sequence[np.ndarray], dtype: torch.dtype) -> np.ndarray:
    """In order. Bytes of elements of ``dtype``, to bytes of their sums."""
    if (scalar := _NUMPY.get(dtype)) is not None:
        total = parts[0].view(scalar) + parts[1].view(scalar)
        for part in parts[2:]:
            total += part.view(scalar)
        return total.view(np.uint8)
    wide = torch.from_numpy(parts[0]).view(dtype).float()
    for part in parts[1:]:
        wide += torch.from_numpy(part).view(dtype)
    return wide.to(dtype).view(torch.uint8).numpy()


@functools.cache
def prepare() -> None:
    """Before peers wait for each other; one after the other only where there is something to compile."""
    alone = np.zeros(STRIDE, np.int64)
    with contextlib.nullcontext() if compiled_before("barrier") else one_process():
        arrive(alone, 0)
        wait(alone, 0, 1, SPINS)
    note_compiled("barrier")
