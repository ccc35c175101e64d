"""Collectives between the workers of a lease: none (one worker), or a torch process group (on one host: ``shm.py``).

Process groups are made directly, beside torch's global default group, so that one process may hold several and a new
one can replace one whose peer died. gloo serves CPU tensors, NCCL those on CUDA.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.core.errors import PeerLost
from longtail.engine.exchange import ByteStream, Volumes

_PIECE = 1024 * 1024
"""Bytes that a rank sends in one round of an exchange."""
_PIECE_CUDA = 8 * _PIECE


class LocalCommunicator:
    """The communicator of a single worker."""

    rank = 0
    size = 1
    kind = "local"

    def all_reduce_sum(self, tensor: Tensor) -> None:
        pass

    def all_gather_shards(self, flat: Tensor, bounds: list[tuple[int, int]]) -> None:
        pass

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def exchange(self, out: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]]) -> None:
        Volumes.agree(self, [ByteStream(tensors) for tensors in out], [ByteStream(tensors) for tensors in into])

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class ProcessGroupCommunicator:
    """Collectives over a process group of its own (see :class:`longtail.core.comm.Communicator`).

    All ``size`` ranks construct it with the same ``store``, which must hold no keys of another group (wrap it in
    ``torch.distributed.PrefixStore`` to share it); construction waits for all of them. ``timeout`` bounds that wait
    and each collective; a dead peer is noticed at once on gloo, by the time-out on NCCL. ``interface_address`` is the
    address that gloo listens on; by default the one that this machine's host name stands for.

    Raises :class:`PeerLost` when ranks do not meet or a collective fails.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        device: torch.device | str = "cpu",
        timeout: timedelta = timedelta(seconds=60),
        interface_address: str | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device(device)
        self.kind = "nccl" if self.device.type == "cuda" else "gloo"
        self._group: Any = None
        make = _nccl if self.device.type == "cuda" else _gloo
        with _peer_lost(f"rank {rank} of {size} did not meet its peers within {timeout.total_seconds():g} s"):
            self._group = make(store, rank, size, timeout, interface_address)
            self.barrier()

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self._run(lambda: [self._group.allreduce([tensor])])

    def all_gather_shards(self, flat: Tensor, bounds: list[tuple[int, int]]) -> None:
        # As bytes: gloo lacks some dtypes, and nothing is computed here.
        parts = [flat[start:end].view(torch.uint8) for start, end in bounds]
        self._run(lambda: [_broadcast(self._group, part, root) for root, part in enumerate(parts) if len(part)])

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        self.all_gather_shards(lengths, [(rank, rank + 1) for rank in range(self.size)])
        ends = [0, *itertools.accumulate(lengths.tolist())]
        flat = torch.empty(ends[-1], dtype=torch.uint8, device=self.device)
        bounds = list(itertools.pairwise(ends))
        if data:
            flat[slice(*bounds[self.rank])] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        self.all_gather_shards(flat, bounds)
        whole = flat.cpu().numpy().tobytes()
        return [whole[start:end] for start, end in bounds]

    def exchange(self, out: Sequence[Sequence[Tensor]], into: Sequence[Sequence[Tensor]]) -> None:
        outgoing, incoming = [ByteStream(tensors) for tensors in out], [ByteStream(tensors) for tensors in into]
        volumes = Volumes.agree(self, outgoing, incoming)
        piece = _PIECE_CUDA if self.device.type == "cuda" else _PIECE
        staging = [torch.empty(2, size * piece, dtype=torch.uint8, device=self.device) for size in (1, self.size - 1)]
        travelling: list[tuple[dist.Work, list[Tensor]]] = []  # with the parts that arrive, by sender

        def unpack() -> None:
            work, arriving = travelling.pop(0)
            with self._guard():
                work.wait()
            for stream, part in zip(incoming, arriving, strict=True):
                stream.write_from(part)

        for round_ in range(volumes.rounds(piece)):
            sends = [cut.nbytes for cut in volumes.cuts(self.rank, round_, piece)]
            receives = [volumes.cuts(peer, round_, piece)[self.rank].nbytes for peer in range(self.size)]
            leaving, arriving = (half[round_ % 2, : sum(n)] for half, n in zip(staging, (sends, receives), strict=True))
            for stream, part in zip(outgoing, leaving.split(sends), strict=True):
                stream.read_into(part)
            with self._guard():
                work = self._group.alltoall_base(arriving, leaving, receives, sends)
            travelling.append((work, list(arriving.split(receives))))
            if len(travelling) > 1:
                unpack()
        while travelling:
            unpack()
        self._run(lambda: [])

    def barrier(self) -> None:
        self.all_reduce_sum(torch.zeros(1, device=self.device))

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError):  # a broken group cannot say goodbye, and need not
                group.abort() if self.device.type == "cuda" else group.shutdown()

    def _run(self, start: Callable[[], Iterable[dist.Work]]) -> None:
        """Start collectives and wait for all of them, on the host: an error must come before the next use."""
        with self._guard():
            for work in list(start()):
                work.wait()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Around what uses the group: when it fails, it is over."""
        if self._group is None:
            raise PeerLost(f"rank {self.rank} of {self.size} is no longer connected to its peers")
        try:
            with _peer_lost(f"rank {self.rank} of {self.size} lost a peer"):
                yield
        except PeerLost:
            self.close()
            raise


@contextlib.contextmanager
def _peer_lost(what: str) -> Any:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, PeerLost):
            raise
        raise PeerLost(f"{what}: {str(error).splitlines()[0]}") from error


def _broadcast(group: Any, part: Tensor, root: int) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return group.broadcast([part], options)


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
