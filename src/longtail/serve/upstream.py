"""One upstream server, and one exchange with it: what is sent, how long is waited for what, what can go wrong."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from longtail.core.errors import ConfigError
from longtail.serve.calls import Headers
from longtail.serve.errors import ApiError

LARGEST_ANSWER_BYTES = 256 << 20
"""Of an answer that is not streamed: it is read whole before the client gets its first byte."""
STALE_S = 1.0
"""A kept connection that is reset so soon had been closed by the server while it was idle: the call never arrived."""
LOOK_S = 5.0
"""How often a silent connection is looked at: after broken framing aiohttp closes it, but lets its reader wait on."""
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_OURS = frozenset(b"host content-length accept-encoding expect x-request-id".split())
_LOST = (aiohttp.ClientError, HttpProcessingError, OSError, RuntimeError)
"""How aiohttp says that a connection is gone (RuntimeError: when it went before a read began)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long an upstream may take, in seconds; there is no limit on a whole exchange.

    ``connect_s``: until the connection stands (name, TCP, TLS). ``first_byte_s``: from then until the first byte of the
    answer's body, so it covers the upstream's own queue and the prompt's prefill. ``idle_s``: between two pieces of it.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ConfigError(f"{field.name} = {getattr(self, field.name)}: a time-out must be above 0 seconds.")


def parse_url(url: str) -> str:
    """The base that paths such as ``/v1/models`` are put behind; equal for two spellings of one server.

    Raises:
        ConfigError: It is not the plain http or https URL of a server. A password in it is not repeated.
    """
    if "@" in url:
        raise ConfigError("An upstream URL holds a user name or password; leave it out, and give the key on its own.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"upstream {url!r} is not a URL ({error}).") from None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[\w.-]+|[\da-f:.]+", host, re.ASCII):
        raise ConfigError(f"upstream {url!r} is not the URL of one server, like http://gpu1:8000.")
    if "?" in url or "#" in url:
        raise ConfigError(f"upstream {url!r}: leave out what comes after '?' or '#'.")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    if not re.fullmatch(r"(/[\w.~%+-]+)*", prefix, re.ASCII) or ".." in prefix:
        raise ConfigError(f"upstream {url!r}: its path may hold letters, digits and . _ ~ % + - only.")
    if port == (443 if parts.scheme == "https" else 80):
        port = None
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{'' if port is None else f':{port}'}{prefix}"


class Failed(Exception):
    """An exchange came to nothing. ``kind`` as in :class:`Outcome`, ``error`` for the client; ``again``: another
    upstream may be asked, because this one cannot be at work on it; ``down``: no more calls for it until a probe
    succeeds. The message is for the log: it holds nothing of the answer."""

    def __init__(
        self, kind: str, error: ApiError, why: object = "", *, again: bool = False, down: bool = False
    ) -> None:
        super().__init__(f"{kind}: {why or error}")
        self.kind, self.error, self.again, self.down = kind, error, again, down


class Upstream:
    """A server's address, load and health. ``window`` is how many samples it should have at once (0: no limit),
    ``samples`` how many it has; ``strikes`` counts failures since it last answered a call."""

    def __init__(self, base: str, *, window: int) -> None:
        self.name = base
        self.window = window
        self.samples = 0
        self.up = True
        self.up_since_s = 0.0
        self.strikes = 0
        self.next_probe_s = 0.0
        self.last_failure: str | None = None
        self.last_used = 0  # the number of the call that went there last
        self.open: set[Exchange] = set()

    def url(self, path: str) -> URL:
        return URL(self.name + path, encoded=True)

    def status(self) -> dict[str, Any]:
        found = {"url": self.name, "up": self.up, "in_flight": self.samples, "last_failure": self.last_failure}
        return {**found, "window": self.window} if self.window else found


class Exchange:
    """One request to one upstream. It counts as the upstream's load from its making until :meth:`close`, which may
    come at any time, more than once, and ends the connection at once unless the answer had been read to its end."""

    def __init__(self, upstream: Upstream, session: aiohttp.ClientSession, timeouts: Timeouts, *, samples: int) -> None:
        self.upstream = upstream
        self.reused = False
        self.began_s = time.monotonic()
        self.connected_s: float | None = None
        self._session, self._timeouts, self._samples = session, timeouts, samples
        self._limit: asyncio.Timeout | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._first: bytes | None = None
        self._closed = False
        upstream.samples += samples
        upstream.open.add(self)

    @property
    def response(self) -> aiohttp.ClientResponse:
        assert self._response is not None, "send() comes first"
        return self._response

    @property
    def measured(self) -> bool:
        """Whether the length of the body is given, or its end is marked, so that a cut is noticed."""
        return "Content-Length" in self.response.headers or "Transfer-Encoding" in self.response.headers

    @property
    def stale(self) -> bool:
        """After a failure: whether the connection was an old one that the server had given up."""
        if not self.reused or self.connected_s is None or self._response is not None:
            return False
        return time.monotonic() - self.connected_s < STALE_S

    def connected(self, *, reused: bool) -> None:
        """Called by the session's traces: the clock for the first byte starts."""
        self.reused, self.connected_s = reused, time.monotonic()
        if self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._timeouts.first_byte_s)

    async def send(self, method: str, path: str, headers: Headers, body: bytes | None = None) -> bool:
        """Waits for the status, the headers and the first bytes; False if there are no bytes.

        Raises:
            Failed: Of kind ``connect``, ``first_byte``, ``cut`` or ``garbage``.
        """
        url = self.upstream.url(path)
        named = [(_text(name), _text(value)) for name, value in headers]
        try:
            async with asyncio.timeout(None) as self._limit:
                self._response = await self._session.request(
                    method, url, headers=named, data=body, allow_redirects=False, trace_request_ctx=self
                )
                self._first = await self._next(math.inf)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            unreached = ApiError(502, "The model server could not be reached.", code="upstream_connect")
            raise Failed("connect", unreached, error, again=True, down=True) from error
        except TimeoutError as error:
            raise Failed("first_byte", _timeout("begin its answer", self._timeouts.first_byte_s)) from error
        except aiohttp.ClientResponseError as error:
            raise garbage("something that is not HTTP") from error
        except _LOST as error:
            raise Failed("cut", _cut("before its answer"), type(error).__name__, again=True, down=True) from error
        return bool(self._first)

    async def read(self) -> bytes:
        """The next bytes of the body, ``b""`` at its end.

        Raises:
            Failed: Of kind ``idle`` or ``cut``.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._closed:
            raise Failed("cut", _cut("in the middle of its answer"))
        try:
            return await self._next(self._timeouts.idle_s)
        except TimeoutError as error:
            raise Failed("idle", _timeout("go on with its answer", self._timeouts.idle_s)) from error
        except _LOST as error:
            raise Failed("cut", _cut("in the middle of its answer"), type(error).__name__, again=True) from error

    async def _next(self, limit_s: float) -> bytes:
        """Raises ``TimeoutError`` after so long, or what aiohttp raises."""
        content = self.response.content
        while True:
            look_s = min(limit_s, LOOK_S)
            try:
                async with asyncio.timeout(look_s):
                    return await content.readany()
            except TimeoutError:
                # After a moment in which nothing here ran, the clock may have been looked at before the socket.
                piece = content.read_nowait()
                if piece or content.is_eof():
                    return piece
                connection = self.response.connection
                if connection is None or connection.closed:
                    raise aiohttp.ClientConnectionError("connection lost") from None
                limit_s -= look_s
                if limit_s <= 0:
                    raise

    async def read_whole(self) -> bytes:
        """As :meth:`read`, to the end; ``garbage`` for more than :data:`LARGEST_ANSWER_BYTES`."""
        pieces, size = [], 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > LARGEST_ANSWER_BYTES:
                raise garbage(f"more than {LARGEST_ANSWER_BYTES >> 20} MiB")
        return b"".join(pieces)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.upstream.samples -= self._samples
        self.upstream.open.discard(self)
        if self._response is not None:
            connection = self._response.connection
            if connection is not None and connection.transport is not None:
                connection.transport.abort()
            self._response.close()
            self._response = None  # which refers to this exchange, by its traces


def request_headers(headers: Iterable[tuple[bytes, bytes]], *, request_id: str, key: str | None) -> Headers:
    """The client's, without those of the hop; names are in lower case.

    An upstream is asked not to compress: a stream could not be watched, and an error event not be added to it.
    """
    found = [(name, value) for name, value in _end_to_end(headers) if name not in _OURS]
    if key is not None:
        found = [(name, value) for name, value in found if name != b"authorization"]
        found.append((b"authorization", b"Bearer " + key.encode()))
    found.append((b"accept-encoding", b"identity"))
    return [*found, (b"x-request-id", request_id.encode())] if request_id else found


def with_header_priority(headers: Headers, priority: int) -> Headers:
    """For servers that read ``X-Vllm-Priority``; one from the client gives way."""
    kept = [(name, value) for name, value in headers if name != b"x-vllm-priority"]
    return [*kept, (b"x-vllm-priority", str(priority).encode())]


def response_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name, value) for name, value in _end_to_end(headers) if name != b"content-length"]


def garbage(what: str) -> Failed:
    """It answered with something that cannot be passed on."""
    return Failed("garbage", ApiError(502, f"The model server answered with {what}.", code="upstream_garbage"))


def cut_short() -> Failed:
    """It ended its answer in good order, but it is not a whole one."""
    error = ApiError(502, "The model server ended its answer too early.", code="upstream_cut")
    return Failed("cut", error, again=True)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    lower = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lower if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in lower if name not in _HOP_BY_HOP and name not in named]


def _text(header: bytes) -> str:
    """aiohttp writes headers as UTF-8."""
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _timeout(what: str, limit_s: float) -> ApiError:
    return ApiError(504, f"The model server did not {what} within {limit_s:g} s.", code="upstream_timeout")


def _cut(where: str) -> ApiError:
    return ApiError(502, f"The model server broke the connection {where}.", code="upstream_cut")
