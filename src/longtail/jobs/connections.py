"""Connections that ask for nothing cannot keep others out.

Whoever has an account on the machine may connect, without the token. So a connection is *idle* whenever no request is
being answered on it (also while one trickles in, or the client takes its time to close), an idle one is cut off after
:data:`IDLE_S`, and of more than :data:`MOST_IDLE` the one that has been idle for longest makes room. A request without
the token is answered at once, and its connection closed (``app.py``), so that it cannot be kept busy by not reading.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

IDLE_S = 5.0
GRACE_S = 0.1
"""More before it is cut off: a loop that was held up may run its timers before it reads what has come meanwhile."""
MOST_IDLE = 32

_idle: WeakKeyDictionary[ServerState, dict[BoundedConnection, asyncio.TimerHandle]] = WeakKeyDictionary()
"""Of each server, those that are idle now, the longest first."""


class BoundedConnection(H11Protocol):
    """One connection of a client; all of a server are in its thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._others = _idle.setdefault(self.server_state, {})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._busy()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._busy()
        elif self not in self._others:
            self._others[self] = self.loop.call_later(IDLE_S, self._look_again)
            if len(self._others) > MOST_IDLE:
                next(iter(self._others))._give_up()

    def _look_again(self) -> None:
        self._others[self] = self.loop.call_later(GRACE_S, self._give_up)

    def _busy(self) -> None:
        if (timer := self._others.pop(self, None)) is not None:
            timer.cancel()

    def _give_up(self) -> None:
        self._busy()
        self.connections.discard(self)
        self.transport.abort()
