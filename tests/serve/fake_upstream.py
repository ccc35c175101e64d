"""An OpenAI-style server for tests, over real sockets, that answers as told and misbehaves as told.

    with FakeUpstream() as fake:                                   # or `async with`; it runs in a thread of its own
        fake.script(Plan(tokens=3), Plan(ending="reset", after=2))  # the next two requests, in turn; then `fake.plan`
        ... POST fake.url + "/v1/chat/completions" ...
        fake.wait(lambda: fake.count("gone") == 1)                 # a client left before its answer was complete
        fake.requests[0].json()

Every POST is one :class:`Request` record. Its ``state`` goes from ``open`` to one of ``answered``, ``broken`` (the plan
ended the connection) and ``gone`` (the client did). Each GET is one of ``probes``; ``/health`` and ``/v1/models`` are
there, the rest is 404.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

HANG_S = 300.0
"""How long anything hangs at most, so that a failing test ends."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one request is answered: streamed if it says ``"stream": true``, else whole.

    What is sent: ``tokens`` for each of the choices that it asks for (``n``), or ``events`` (each with its blank line),
    or ``body`` with ``status`` and ``headers``. When: ``wait_s`` before the status line, ``pause_s`` between headers
    and body, ``gap_s`` between events; ``hold`` is waited for before the status line, ``rest`` before the second event.
    In which pieces: at random byte positions drawn with the seed ``split``, each a chunk of its own, or event by event.

    How it ends: ``whole``; by ``cut`` (the connection ends), ``reset`` (RST), ``hang`` (silence) or ``bad_chunk``
    (broken framing) after so many events of a stream, or bytes of a body; ``half`` sends half of the next event first.
    ``after=None`` comes before the status line. ``stop`` ends a stream in good order after so many events.
    """

    tokens: int = 5
    events: Sequence[bytes] | None = None
    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    body: bytes | None = None
    content_type: str | None = None
    wait_s: float = 0.0
    pause_s: float = 0.0
    gap_s: float = 0.0
    hold: threading.Event | None = None
    rest: threading.Event | None = None
    split: int | None = None
    newline: bytes = b"\n"
    usage: bool = True
    ending: Literal["whole", "cut", "reset", "hang", "bad_chunk", "stop"] = "whole"
    after: int | None = None
    half: bool = False
    measured: bool = True  # False: neither length nor chunks; the end of the connection is the end of the body


@dataclass(eq=False)
class Request:
    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    state: Literal["open", "answered", "broken", "gone"] = "open"
    connection: int = 0  # requests with the same number came over one connection
    sent: int = 0  # pieces of the answer's body

    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The value of a header that must not come twice."""
        found = [value for key, value in self.headers if key.lower() == name.encode()]
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0].decode() if found else None

    @property
    def last(self) -> bool:
        """Whether the client wants the connection closed after it."""
        return self.header("connection") == "close"


@dataclass
class FakeUpstream:
    """``plan`` answers what the script does not; a function of the request or one for all. ``health``: status of
    ``/health``."""

    plan: Plan | Callable[[Request], Plan] = field(default_factory=Plan)
    health: int = 200
    models: Sequence[str] = ("m",)
    tls: ssl.SSLContext | None = None
    requests: list[Request] = field(default_factory=list)
    most_open: int = 0
    probes: list[Request] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._script: list[Plan] = []
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._numbers = 0
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def script(self, *plans: Plan) -> None:
        """For the next requests, in turn."""
        with self._changed:
            self._script.extend(plans)

    def count(self, state: str) -> int:
        return sum(request.state == state for request in self.requests)

    def wait(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Until ``condition()`` holds; it is looked at whenever a request comes or changes its state."""
        with self._changed:
            if not self._changed.wait_for(condition, timeout_s):
                states = [f"{request.path}: {request.state}" for request in self.requests]
                raise AssertionError(f"not within {timeout_s} s; requests: {states}, probes: {len(self.probes)}")

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """:meth:`wait` without blocking the event loop."""
        await asyncio.to_thread(self.wait, condition, timeout_s)

    def up(self) -> None:
        """Listen, on the same port as before."""
        self._run(self._listen())

    def down(self) -> None:
        """Refuse connections, and end those there are."""
        self._run(self._stop())

    def __enter__(self) -> FakeUpstream:
        self._thread.start()
        self.up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def __aenter__(self) -> FakeUpstream:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.__exit__)

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = dict(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for writer in connections.values():
            writer.transport.abort()
        await asyncio.sleep(0)

    # Connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        self._numbers += 1
        number, first = self._numbers, b""
        try:
            while (request := await _read_request(reader, first)) is not None:
                request.connection = number
                first = await self._handle(request, reader, writer)
                if not first:
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            del self._connections[task]
            writer.close()

    async def _handle(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The first byte of the next request on this connection; none if there will not be one."""
        if request.method == "GET":
            await self._handle_get(request, writer)
            return b"" if request.last else await reader.read(1)
        with self._changed:
            self.requests.append(request)
            self.most_open = max(self.most_open, self.count("open"))
            plan = self._script.pop(0) if self._script else self.plan if isinstance(self.plan, Plan) else None
            self._changed.notify_all()
        if plan is None:
            assert not isinstance(self.plan, Plan)
            plan = self.plan(request)
        work = asyncio.ensure_future(_Answer(plan, request, writer).send())
        next_byte = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, next_byte}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                with contextlib.suppress(ConnectionError):
                    if await next_byte:
                        await work
            if not work.done():
                writer.transport.abort()
                self._move(request, "gone")
                return b""
            try:
                keep = work.result()
            except ConnectionError:
                self._move(request, "gone")
                return b""
            self._move(request, "answered" if keep is not None else "broken")
            return await next_byte if keep else b""
        except asyncio.CancelledError:
            if request.state == "open":
                self._move(request, "broken")
            raise
        finally:
            for each in (work, next_byte):
                each.cancel()
            await asyncio.gather(work, next_byte, return_exceptions=True)

    async def _handle_get(self, request: Request, writer: asyncio.StreamWriter) -> None:
        with self._changed:
            self.probes.append(request)
            self._changed.notify_all()
        if request.path == "/health":
            plan = Plan(status=self.health, body=b"")
        elif request.path == "/v1/models":
            data = [{"id": name, "object": "model"} for name in self.models]
            plan = Plan(body=json.dumps({"object": "list", "data": data}).encode())
        else:
            plan = Plan(status=404, body=b'{"detail": "Not Found"}')
        await _Answer(plan, request, writer).send()

    def _move(self, request: Request, state: Literal["answered", "broken", "gone"]) -> None:
        with self._changed:
            request.state = state
            self._changed.notify_all()


class _Answer:
    def __init__(self, plan: Plan, request: Request, writer: asyncio.StreamWriter) -> None:
        self._plan, self._request, self._writer = plan, request, writer
        self._chunked = False

    async def send(self) -> bool | None:
        """True: the connection can be used again. False: it ends here in good order. None: it was broken."""
        plan = self._plan
        await asyncio.sleep(plan.wait_s)
        await self._until(plan.hold)
        if plan.ending not in ("whole", "stop") and plan.after is None:
            return await self._break()
        asked = json.loads(self._request.body) if plan.body is None else {}
        if plan.body is None and asked.get("stream") is True:
            return await self._stream(asked)
        body = plan.body if plan.body is not None else whole_answer(self._request.path, asked, plan)
        await self._head(plan.content_type or "application/json", len(body))
        if plan.after is not None:
            await self._write(body[: plan.after])
            return await self._break()
        await self._write(body)
        return plan.measured and not self._request.last

    async def _until(self, flag: threading.Event | None) -> None:
        for _ in range(round(HANG_S / 0.005)):
            if flag is None or flag.is_set():
                return
            await asyncio.sleep(0.005)

    async def _stream(self, asked: dict[str, Any]) -> bool | None:
        plan = self._plan
        events = list(plan.events) if plan.events is not None else stream_events(self._request.path, asked, plan)
        self._chunked = plan.measured
        await self._head(plan.content_type or "text/event-stream; charset=utf-8", None)
        sent = events if plan.after is None else events[: plan.after]
        if plan.half and plan.after is not None:
            sent = [*sent, events[plan.after][: len(events[plan.after]) // 2]]
        for i, piece in enumerate(sent if plan.split is None else split(b"".join(sent), random.Random(plan.split))):
            if i and plan.gap_s:
                await asyncio.sleep(plan.gap_s)
            if i == 1:
                await self._until(plan.rest)
            await self._write(piece)
        if plan.ending not in ("whole", "stop"):
            return await self._break()
        if self._chunked:
            self._writer.write(b"0\r\n\r\n")
            await self._writer.drain()
        return plan.measured

    async def _head(self, content_type: str, length: int | None) -> None:
        plan = self._plan
        lines = [f"HTTP/1.1 {plan.status} Status", f"Content-Type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in plan.headers]
        if not plan.measured or self._request.last:
            lines.append("Connection: close")
        if self._chunked:
            lines.append("Transfer-Encoding: chunked")
        elif plan.measured:
            lines.append(f"Content-Length: {length}")
        self._writer.write("\r\n".join([*lines, "", ""]).encode())
        await self._writer.drain()
        await asyncio.sleep(plan.pause_s)

    async def _write(self, piece: bytes) -> None:
        if piece:
            self._writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self._chunked else piece)
            await self._writer.drain()
            self._request.sent += 1

    async def _break(self) -> None:
        if self._plan.ending == "hang":
            await asyncio.sleep(HANG_S)
        elif self._plan.ending == "reset":
            sock: socket.socket = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        elif self._plan.ending == "bad_chunk":
            self._writer.write(b"no length\r\n")
            await self._writer.drain()
            await asyncio.sleep(HANG_S)
        else:
            self._writer.close()


async def _read_request(reader: asyncio.StreamReader, first: bytes) -> Request | None:
    head = first + await reader.readuntil(b"\r\n\r\n")
    top, *lines = head[:-4].split(b"\r\n")
    method, path, _ = top.decode().split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
    return Request(method, path, headers, await reader.readexactly(length))


def split(content: bytes, rng: random.Random, pieces: int = 40) -> list[bytes]:
    """Cut at random positions."""
    at = sorted(rng.sample(range(1, len(content)), min(pieces, len(content) - 1)))
    return [content[i:j] for i, j in zip([0, *at], [*at, len(content)], strict=True)]


def event(data: dict[str, Any] | str, newline: bytes = b"\n") -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return b"data: " + text.encode() + newline * 2


def text_of(choice: int, token: int) -> str:
    return f"c{choice}t{token} "


def stream_events(path: str, asked: dict[str, Any], plan: Plan) -> list[bytes]:
    """The choices take turns; then a finish reason for each, the usage, and ``[DONE]``."""
    chat, n = path.endswith("chat/completions"), asked.get("n", 1)
    top = {"id": "fake-1", "object": "chat.completion.chunk" if chat else "text_completion", "model": "m"}

    def chunk(choice: int, text: str, finish: str | None = None) -> bytes:
        said = {"delta": {"content": text} if text else {}} if chat else {"text": text}
        choices = [{"index": choice, **said, "logprobs": None, "finish_reason": finish}]
        return event({**top, "choices": choices}, plan.newline)

    events = [chunk(choice, text_of(choice, token)) for token in range(plan.tokens) for choice in range(n)]
    events += [chunk(choice, "", "stop") for choice in range(n)]
    if plan.usage:
        usage = {"prompt_tokens": 3, "completion_tokens": plan.tokens * n, "total_tokens": 3 + plan.tokens * n}
        events.append(event({**top, "choices": [], "usage": usage}, plan.newline))
    return [*events, event("[DONE]", plan.newline)]


def whole_answer(path: str, asked: dict[str, Any], plan: Plan) -> bytes:
    chat, n = path.endswith("chat/completions"), asked.get("n", 1)
    choices = []
    for i in range(n):
        text = "".join(text_of(i, token) for token in range(plan.tokens))
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choices.append({"index": i, **said, "finish_reason": "stop"})
    usage = {"prompt_tokens": 3, "completion_tokens": plan.tokens * n, "total_tokens": 3 + plan.tokens * n}
    return json.dumps({"id": "fake-1", "model": "m", "choices": choices, "usage": usage}).encode()
