"""Calls of a LocalBackend as the front door makes them, and what came back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from longtail.serve.calls import CHAT, COMPLETIONS, Call, Reply
from longtail.serve.local import LocalBackend
from serve.text_models import BEGIN

_numbers = itertools.count()


def call(path: str = COMPLETIONS, **fields: Any) -> Call:
    """``model`` is m if not given."""
    fields = {"model": "m", **fields}
    return Call(
        request_id=f"req-{next(_numbers)}",
        path=path,
        body=json.dumps(fields).encode(),
        fields=fields,
        stream=fields.get("stream") is True,
    )


def chat(content: str = "Hello", **fields: Any) -> Call:
    return call(CHAT, **{"messages": [{"role": "user", "content": content}], **fields})


def say(**fields: Any) -> Call:
    """A completion by the speaker of ``text_models.py``."""
    return call(prompt=[BEGIN], **{"max_tokens": 20, **fields})


def serving(folder: Path, use: Callable[[LocalBackend], Awaitable[None]], **options: Any) -> None:
    """Start a backend, use it, close it; nothing of it may be left then."""

    async def main() -> None:
        backend = LocalBackend(folder, **{"name": "m", "kv_bytes": 64 << 20, **options})
        await backend.start()
        try:
            async with asyncio.timeout(300):
                await use(backend)
                await idle(backend)
        finally:
            await backend.close()

    asyncio.run(main())


async def idle(backend: LocalBackend) -> None:
    """Until nothing runs and no block is used."""
    async with asyncio.timeout(120):
        while any(backend.status()[key] for key in ("running", "waiting", "blocks_used")):
            await asyncio.sleep(0.005)


async def ask(backend: LocalBackend, asked: Call) -> dict[str, Any]:
    """The body of a whole answer."""
    backend.check(asked)
    reply = await backend.answer(asked)
    assert reply.status == 200
    body = b"".join([chunk async for chunk in reply.chunks])
    assert dict(reply.headers) == {b"content-type": b"application/json", b"content-length": str(len(body)).encode()}
    return json.loads(body)


async def listen(backend: LocalBackend, asked: Call) -> tuple[list[dict[str, Any]], Reply]:
    """The events of a stream, without ``[DONE]``, which must be there."""
    backend.check(asked)
    reply = await backend.answer(asked)
    assert reply.status == 200
    assert dict(reply.headers)[b"content-type"].startswith(b"text/event-stream")
    events = await events_of(reply)
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events], reply


async def events_of(reply: Reply) -> list[str]:
    """The data of a stream's events; each event is whole in one chunk."""
    events: list[str] = []
    async for chunk in reply.chunks:
        assert chunk.endswith(b"\n\n")
        for event in chunk.decode().removesuffix("\n\n").split("\n\n"):
            assert event.startswith("data: ")
            assert "\n" not in event
            events.append(event.removeprefix("data: "))
    return events


def joined(events: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def finishes(events: list[dict[str, Any]]) -> dict[int, str]:
    """The finish reason of each choice; it comes once, last."""
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in found, "something comes after the finish reason"
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"]
    return found


def scored(events: list[dict[str, Any]], key: str) -> list[Any]:
    """A list of log-probabilities, put together from a stream of one choice."""
    parts = [choice["logprobs"][key] for event in events for choice in event["choices"] if choice["logprobs"]]
    return list(itertools.chain.from_iterable(parts))
