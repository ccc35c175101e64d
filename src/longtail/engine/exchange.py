"""All-to-all exchanges, as all communicators do them: which bytes go in which round, and tensors as runs of bytes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longtail.core.comm import Communicator


class Cut(NamedTuple):
    """The part of a sender's piece that is for one receiver: it starts ``at`` that byte."""

    at: int
    nbytes: int


class Volumes:
    """Who sends how much to whom: ``nbytes[sender][receiver]``.

    A sender's bytes are one run: those for the next rank first, then those for the one after it, and so around. Round k
    of an exchange carries the k-th piece of each run, so that whatever the volumes are, staging is used in full.
    """

    def __init__(self, nbytes: Sequence[Sequence[int]]) -> None:
        self.nbytes, size = nbytes, len(nbytes)
        self._starts = []
        for sender, row in enumerate(nbytes):
            around = [(sender + 1 + i) % size for i in range(size)]
            starts = dict(zip(around, itertools.accumulate((row[r] for r in around), initial=0), strict=False))
            self._starts.append([starts[receiver] for receiver in range(size)])

    @classmethod
    def agree(cls, comm: Communicator, outgoing: Sequence[ByteStream], incoming: Sequence[ByteStream]) -> Volumes:
        """Collective. Raises ``ValueError`` on every rank where a sender and its receiver differ."""
        mine = np.array([[stream.nbytes for stream in streams] for streams in (outgoing, incoming)], np.int64)
        if mine.shape != (2, comm.size):
            raise ValueError(f"an exchange between {comm.size} ranks wants a list of tensors for each of them")
        given = np.frombuffer(b"".join(comm.all_gather_bytes(mine.tobytes())), np.int64)
        sent, received = given.reshape(comm.size, 2, comm.size).swapaxes(0, 1)
        for sender, receiver in np.argwhere(sent != received.T):
            raise ValueError(
                f"rank {sender} has {sent[sender, receiver]} bytes for rank {receiver}, which expects "
                f"{received[receiver, sender]}"
            )
        for rank in np.flatnonzero(sent.diagonal()):
            raise ValueError(f"rank {rank} sends to itself")
        return cls(sent.tolist())

    def rounds(self, piece: int) -> int:
        return max(-(-sum(row) // piece) for row in self.nbytes)

    def cuts(self, sender: int, round_: int, piece: int) -> list[Cut]:
        """What the sender's piece of this round holds for each receiver."""
        begin, end = round_ * piece, (round_ + 1) * piece
        cuts = []
        for start, volume in zip(self._starts[sender], self.nbytes[sender], strict=True):
            first, last = max(start, begin), min(start + volume, end)
            cuts.append(Cut(first - begin, last - first) if first < last else Cut(0, 0))
        return cuts


class ByteStream:
    """Contiguous tensors as one run of bytes, read or written once from its start to its end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("only contiguous tensors can be exchanged")
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._tensors = iter(tensors)
        self._current, self._at, self._end = torch.empty(0), 0, 0

    def read_into(self, buffer: Tensor) -> None:
        """Copy the next ``len(buffer)`` bytes to it (uint8)."""
        for at, start, nbytes in self._next(len(buffer)):
            _move(buffer, at, self._current, start, nbytes)

    def write_from(self, buffer: Tensor) -> None:
        """Overwrite the next ``len(buffer)`` bytes by it (uint8)."""
        for at, start, nbytes in self._next(len(buffer)):
            _move(self._current, start, buffer, at, nbytes)

    def _next(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Goes ahead: where in the ``nbytes`` we are, where in the current tensor that is, and for how many bytes."""
        at = 0
        while at < nbytes:
            if self._at == self._end:
                self._current = next(self._tensors)
                self._at, self._end = 0, self._current.nbytes
            n = min(nbytes - at, self._end - self._at)
            yield at, self._at, n
            at, self._at = at + n, self._at + n


def _move(into: Tensor, at: int, source: Tensor, start: int, nbytes: int) -> None:
    """``nbytes`` from byte ``start`` of a contiguous tensor to byte ``at`` of another."""
    if into.is_cpu and source.is_cpu:  # many times faster than torch on small tensors
        ctypes.memmove(into.data_ptr() + at, source.data_ptr() + start, nbytes)
    else:
        into, source = (tensor.detach().view(-1).view(torch.uint8) for tensor in (into, source))
        into[at : at + nbytes] = source[start : start + nbytes]
