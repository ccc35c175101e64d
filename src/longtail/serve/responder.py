"""One HTTP answer: a whole one, a relayed one, or an error at whatever point it is known."""

from __future__ import annotations

import asyncio

from longtail.serve.asgi import ClientGone, Send, respond
from longtail.serve.calls import Headers, Reply
from longtail.serve.errors import ApiError

EVENT_STREAM = b"text/event-stream"
CLOSING = frozenset({401, 408, 413, 415})
"""Statuses after which the rest of the request is not worth reading."""

TAKEN_WITHIN_S = 60.0
"""A client that takes nothing for so long is gone: its place is for others."""
OURS = frozenset({b"x-request-id", b"date"})
"""Of a relayed answer's headers: those that this server sets."""


class Responder:
    """Exactly one answer goes out, whatever happens in between. ``extra`` headers are part of every answer."""

    def __init__(self, send: Send, extra: Headers) -> None:
        self._send = send
        self._extra = extra
        self.status: int | None = None
        """Of the answer that has begun."""
        self._streaming = False
        self._comments: asyncio.Future[None] | None = None

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        await respond(self._send, status, [*headers, *self._extra], body)

    async def relay(self, reply: Reply) -> None:
        """Send a reply on as it comes; closes its chunks whatever happens."""
        try:
            await self._stop_comments()
            if self.status is None:
                await self._start(reply.status, reply.headers)
            elif reply.status != 200:  # comments went out under a 200: the error must be an event
                await self._event_of(reply)
                return
            async for chunk in reply.chunks:
                async with asyncio.timeout(TAKEN_WITHIN_S):
                    await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self._end()
        except TimeoutError:
            raise ClientGone from None
        finally:
            await reply.chunks.aclose()

    async def error(self, error: ApiError) -> None:
        """As a status if nothing went out yet, else as an event of the stream, without ``[DONE]``."""
        await self._stop_comments()
        if self.status is None:
            closing = [(b"connection", b"close")] if error.status in CLOSING else []
            await self.whole(error.status, [*error.headers(), *closing], error.body())
        elif self._streaming:
            await self._send({"type": "http.response.body", "body": error.event(), "more_body": True})
            await self._end()

    def comment_every(self, every_s: float) -> None:
        """Until something else is sent, a comment line now and then, so that nothing on the way takes the connection
        for dead. Needs :meth:`close`."""
        self._comments = asyncio.ensure_future(self._comment(every_s))

    async def close(self) -> None:
        await self._stop_comments()

    async def _stop_comments(self) -> None:
        task, self._comments = self._comments, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _comment(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if self.status is None:
                await self._start(200, [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-cache")])
            await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        self._streaming = any(k == b"content-type" and v.startswith(EVENT_STREAM) for k, v in headers)
        kept = [(name, value) for name, value in headers if name not in OURS]
        await self._send({"type": "http.response.start", "status": status, "headers": [*kept, *self._extra]})

    async def _event_of(self, reply: Reply) -> None:
        body = b"".join([chunk async for chunk in reply.chunks]).strip()
        lines = b"\n".join(b"data: " + line for line in body.splitlines() or [b"{}"])
        await self._send({"type": "http.response.body", "body": lines + b"\n\n", "more_body": True})
        await self._end()

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})
