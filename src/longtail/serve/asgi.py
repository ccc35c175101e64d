"""The few things that a plain ASGI handler needs: a bounded body, an answer, and to see that the client went away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

from longtail.serve.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection; nobody is left to be answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this lower-case name."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, *, limit: int, within_s: float) -> bytes:
    """The whole body. Raises :class:`ApiError` 413 above ``limit`` bytes, 408 if it takes longer than ``within_s``
    seconds, 415 if it is compressed, and :class:`ClientGone`."""
    if header(scope, b"content-encoding") not in (None, b"identity"):
        raise ApiError(415, "Compressed request bodies are not accepted.", code="unsupported_encoding")
    too_large = ApiError(413, f"The request body exceeds the limit of {limit:,} bytes.", code="body_too_large")
    if int(header(scope, b"content-length") or 0) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(within_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise too_large
                if not message.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"The request body did not arrive within {within_s:g} s.", code="slow_body") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run ``work``, and cancel it when the client goes away (:class:`ClientGone`). The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return
        raise ClientGone
    finally:
        for each in (watch, task):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
    """A whole answer at once."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
