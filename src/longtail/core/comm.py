"""The protocol of collectives between the workers of a lease; implementations are in ``engine/``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


CPU_COMMUNICATOR = "shm" if sys.platform == "linux" else "gloo"
"""What connects workers on one machine's CPU, unless the job file says otherwise."""


class Communicator(Protocol):
    """Collectives over ``size`` ranks. Every member calls the same methods in the same order.

    All methods are synchronous and raise :class:`longtail.core.errors.PeerLost` when a peer is gone
    or does not answer in time; afterwards the communicator is unusable.
    """

    rank: int
    size: int
    kind: str
    """``local``, ``gloo``, ``nccl`` or ``shm``."""

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over ranks, in place; the same bits on every rank."""

    def all_gather_shards(self, flat: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
        """Fill the 1-D ``flat``: rank r contributes ``flat[slice(*bounds[r])]``, and receives all others, in place."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What each rank gave, in the order of ranks; of any lengths."""

    def exchange(self, out: Sequence[Sequence[torch.Tensor]], into: Sequence[Sequence[torch.Tensor]]) -> None:
        """All-to-all: the bytes of the tensors ``out[r]``, one after the other, go to rank r, and fill its
        ``into[rank]``; ``out[rank]`` and ``into[rank]`` are empty.

        All tensors are contiguous. Of any total size: it goes in pieces, and the next is packed while one travels.
        Raises ``ValueError``, on every rank alike, where a sender's total differs from its receiver's.
        """

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Release sockets and threads; safe to call twice."""
