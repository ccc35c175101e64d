"""The protocol of collectives between the workers of a lease; implementations are in ``engine/comm.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Communicator(Protocol):
    """Collectives over ``size`` ranks. Every member calls the same methods in the same order.

    All methods are synchronous and raise :class:`longtail.core.errors.PeerLost` when a peer is gone
    or does not answer in time; afterwards the communicator is unusable.
    """

    rank: int
    size: int

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over ranks, in place; the same bits on every rank."""

    def all_gather_shards(self, flat: torch.Tensor, bounds: list[tuple[int, int]]) -> None:
        """Fill the 1-D ``flat``: rank r contributes ``flat[slice(*bounds[r])]``, and receives all others, in place."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Release sockets and threads; safe to call twice."""
