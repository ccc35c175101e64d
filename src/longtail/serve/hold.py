"""Holds requests back until there is room for them, and lets them go in the order of the queue.

    async with hold.turn(client="team-a", weight=1.0, deadline_s=d, cost=120.0, places=1, max_concurrent=None) as turn:
        ...                    # now at most `window()` samples are at work, this request's among them
        turn.settle(137)       # the tokens it really took

Invariants:

* A request is released at most once, and its places are given back once, however its block ends.
* Places in flight never exceed the window by a release; only a request that is larger than the window goes beyond it,
  and alone.
* While somebody waits who may run and fits, somebody is released: whenever a request comes, ends or is cancelled, and
  when :meth:`Hold.release` is called because the window has grown. No timer is involved.
* A request that is cancelled while it waits never runs.

All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from longtail.serve.queue import FairQueue, Ticket


class Draining(Exception):
    """No new requests are taken."""


@dataclass(slots=True)
class Turn:
    """A released request. ``waited_s``: how long it was held back; ``overdue``: it was let go because it had waited the
    queue's ``max_wait_s``."""

    waited_s: float
    overdue: bool
    tokens: float | None = None

    def settle(self, tokens: float) -> None:
        """Say what it really cost; without, it is charged what was predicted. Counts at the end of the block."""
        if not 0 <= tokens < math.inf:
            raise ValueError(f"impossible number of tokens: {tokens}")
        self.tokens = tokens


class Hold:
    """``window()`` is how many samples may be in flight now; 0 lets nobody go, infinity everybody. ``clock`` gives
    seconds."""

    def __init__(
        self, queue: FairQueue, window: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.queue = queue
        self._window, self._clock = window, clock
        self._waiters: dict[Ticket, asyncio.Future[float]] = {}
        self._in_flight = 0
        self._running: Counter[str] = Counter()
        self._caps: dict[str, int | None] = {}
        self._draining = False

    @property
    def in_flight(self) -> int:
        """Places of all requests that were released and have not ended."""
        return self._in_flight

    def in_flight_of(self, client: str) -> int:
        """Requests of one client that were released and have not ended."""
        return self._running[client]

    def oldest_s(self) -> float | None:
        """For how long the request at the back of the line has waited; None if none waits."""
        arrived = self.queue.oldest_s
        return None if arrived is None else self._clock() - arrived

    def drain(self) -> None:
        """From now on new turns raise :class:`Draining`; who waits is still served."""
        self._draining = True

    @asynccontextmanager
    async def turn(
        self,
        client: str,
        weight: float,
        deadline_s: float,
        cost: float,
        places: int,
        max_concurrent: int | None,
    ) -> AsyncIterator[Turn]:
        """Wait for a turn, and keep its places until the end of the block.

        ``max_concurrent``: so many requests of this client may be in flight; those beyond it wait. Raises
        :class:`Draining` and :class:`~longtail.serve.queue.QueueFull`.
        """
        if self._draining:
            raise Draining("no new requests are taken")
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        ticket = self.queue.push(client, weight, deadline_s, cost, places, self._clock())
        self._caps[client] = max_concurrent
        released = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            self.release()
            turn = Turn(await released - ticket.arrival_s, ticket.overdue)
        except BaseException:
            # A cancellation can meet a release: then the places are there already, and nobody will use them.
            if self.queue.remove(ticket):
                del self._waiters[ticket]
                self._forget(client)
            else:
                self._give_back(ticket, 0.0)
            self.release()
            raise
        try:
            yield turn
        finally:
            self._give_back(ticket, ticket.cost if turn.tokens is None else turn.tokens)
            self.release()

    def release(self) -> None:
        """Let go whom there is room for; to be called when the window may have grown."""
        window, now_s = self._window(), self._clock()

        def fits(places: int) -> bool:
            return not self._in_flight or self._in_flight + places <= window

        while len(self.queue) and self._in_flight < window:
            ticket = self.queue.pop(now_s, may_run=self._may_run, fits=fits)
            if ticket is None:
                return
            self._in_flight += ticket.places
            self._running[ticket.client] += 1
            waiter = self._waiters.pop(ticket)
            if not waiter.done():  # else it is being cancelled, and gives its places back when that arrives
                waiter.set_result(now_s)

    def _may_run(self, client: str, places: int) -> bool:
        cap = self._caps[client]
        return cap is None or self._running[client] < cap

    def _give_back(self, ticket: Ticket, cost: float) -> None:
        self._in_flight -= ticket.places
        self._running[ticket.client] -= 1
        self.queue.settle(ticket, cost)
        self._forget(ticket.client)

    def _forget(self, client: str) -> None:
        if not self._running[client] and not self.queue.waiting(client):
            del self._running[client], self._caps[client]
