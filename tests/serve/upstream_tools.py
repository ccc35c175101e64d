"""What the tests of the gateway's backend have in common."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any
from unittest.mock import patch

import pytest

from longtail.serve import upstream as upstream_module
from longtail.serve import upstreams as upstreams_module
from longtail.serve.calls import CHAT, Call, Reply
from longtail.serve.errors import ApiError
from longtail.serve.upstream import Timeouts
from longtail.serve.upstreams import Upstreams
from serve.fake_upstream import FakeUpstream, Plan, stream_events

BUSY = Plan(status=429, headers=[("Retry-After", "7")], body=b'{"error": {"message": "slow down", "code": "busy"}}')
PATIENT = Timeouts(connect_s=60.0, first_byte_s=60.0, idle_s=60.0)


def call(*, path: str = CHAT, stream: bool = False, n: int = 1, body: bytes | None = None, **more: Any) -> Call:
    fields = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream, "n": n}
    body = json.dumps(fields).encode() if body is None else body
    given = {"request_id": "r-1", "samples": n, "headers": ((b"content-type", b"application/json"),)} | more
    return Call(path=path, body=body, fields=json.loads(body), stream=stream, **given)


class Gateway(Upstreams):
    """Remembers what it reported, and when something changed."""

    def __init__(self, urls: Sequence[str], **options: Any) -> None:
        self.reports: list[tuple[str, str]] = []
        self.turned = asyncio.Event()
        defaults = {"timeouts": PATIENT, "window": 4, "key": None, "tag": frozenset(), "ca_file": None}
        super().__init__(urls, reported=lambda url, kind: self.reports.append((url, kind)), **defaults | options)
        self.changed = self.turned.set

    @property
    def kinds(self) -> list[str]:
        return [kind for _, kind in self.reports]

    async def until_up(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(u["up"] for u in self.status()["upstreams"]) != count:
                self.turned.clear()
                await self.turned.wait()


@contextlib.asynccontextmanager
async def gateway(*fakes: FakeUpstream | str, **options: Any) -> AsyncIterator[Gateway]:
    """It looks often, and waits long. Checks at its end that every place was given back."""
    found = Gateway([fake if isinstance(fake, str) else fake.url for fake in fakes], **options)
    with (
        patch.multiple(upstreams_module, BACKOFF_S=(0.1, 1.0), PROBE_S=60.0),
        patch.object(upstream_module, "LOOK_S", 0.3),
    ):
        await found.start()
        try:
            yield found
            assert [u["in_flight"] for u in found.status()["upstreams"]] == [0] * len(fakes)
        finally:
            await found.close()


def run(work: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(200):
            await work

    asyncio.run(limited())


async def content(reply: Reply) -> bytes:
    return b"".join([chunk async for chunk in reply.chunks])


async def refused(work: Awaitable[Reply]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


def made(fake_plan: Plan, asked: Call) -> list[bytes]:
    return stream_events(asked.path, json.loads(asked.body), fake_plan)


def error_code(last_event: bytes) -> str:
    """The code in the one error event that these bytes are."""
    assert last_event.startswith(b"data: ")
    assert last_event.endswith(b"\n\n")
    assert last_event.count(b"\n\n") == 1
    return json.loads(last_event[6:])["error"]["code"]


async def settled(*fakes: FakeUpstream) -> None:
    """Until every request has its final state: a client has the last byte a little before the server knows."""
    for fake in fakes:
        await fake.until(lambda fake=fake: fake.count("open") == 0)
