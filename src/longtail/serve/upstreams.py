"""The gateway's backend: each call goes to one of several OpenAI-compatible servers, whose answer comes back as it is.

Invariants:

* What the client gets is the answer of one server. Another one is asked only while no byte has gone out, and only if
  the first cannot be at work on the call any more.
* An answer that is not streamed is read whole first, so a client never gets half of one.
* A stream is passed on event by event, byte for byte. One that breaks ends with an error event, without ``[DONE]``.
* Whatever ends a call (its answer, an error, a client that left) gives back the upstream's place exactly once, and
  closes the connection unless the answer had been read to its end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from longtail.core.errors import ConfigError
from longtail.serve.body import with_priority
from longtail.serve.calls import CHAT, COMPLETIONS, Call, Outcome, Reply, once
from longtail.serve.errors import ApiError
from longtail.serve.relay import Relay, read_answer
from longtail.serve.upstream import (
    Exchange,
    Failed,
    Timeouts,
    Upstream,
    cut_short,
    garbage,
    parse_url,
    request_headers,
    response_headers,
    with_header_priority,
)

log = logging.getLogger("longtail.serve")

BACKOFF_S = (0.5, 30.0)
"""Until a server that failed is probed again: at first, and at most."""
PROBE_S = 5.0
"""How long a probe may take."""
KEEP_ALIVE_S = 4.0
"""How long idle connections are kept: less than the 5 s after which uvicorn, and so vLLM, closes them."""
UNLIMITED = 1 << 30
"""The window of an upstream without one, in samples."""
_DOWN = frozenset({502, 503, 504})
_ELSEWHERE = frozenset({429, 503})
_NOT_THERE = frozenset({404, 405, 501})


class Upstreams:
    """A :class:`~longtail.serve.calls.Backend`.

    ``window`` is how many samples each upstream should have at once, 0 for no limit; ``Upstream.window`` may be changed
    while it serves. ``key`` is sent to all of them as the bearer token; without one the client's own ``Authorization``
    goes through. ``tag`` says where a call's priority is put: into the ``header`` X-Vllm-Priority, the ``body``'s field
    ``priority``, or both. ``ca_file`` replaces the system's certificate authorities. A call may move to another
    upstream ``retries`` times. ``reported(url, kind)`` is called for every exchange that failed, also if the call then
    succeeds elsewhere. ``changed()``, which may be set any time, is called when an upstream goes down or comes up.

    Raises:
        ConfigError: For a URL or a ``ca_file`` that cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeouts: Timeouts,
        window: int,
        key: str | None,
        tag: frozenset[str],
        ca_file: Path | None,
        retries: int = 1,
        reported: Callable[[str, str], None],
    ) -> None:
        bases = [parse_url(url) for url in urls]
        if not bases:
            raise ConfigError("No upstream is given: name at least one server, like http://gpu1:8000.")
        if twice := next((base for base in bases if bases.count(base) > 1), None):
            raise ConfigError(f"upstream {twice} is given twice.")
        if unknown := tag - {"body", "header"}:
            raise ConfigError(f"A priority cannot be put into {sorted(unknown)}, only into body and header.")
        self.changed: Callable[[], None] = lambda: None
        self.upstreams = tuple(Upstream(base, window=window) for base in bases)
        self._timeouts, self._key, self._tag = timeouts, key, tag
        self._tls = _tls_context(ca_file) if ca_file is not None else True
        self._retries, self._reported = retries, reported
        self._session: aiohttp.ClientSession | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._closing = False

    async def start(self) -> None:
        """Those that do not answer a probe now begin as down; none has to be up."""
        traces = aiohttp.TraceConfig()
        traces.on_connection_create_end.append(_on_new_connection)
        traces.on_connection_reuseconn.append(_on_kept_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=self._tls),
            timeout=aiohttp.ClientTimeout(connect=self._timeouts.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
            auto_decompress=False,
            trace_configs=[traces],
        )
        alive = await asyncio.gather(*map(self._alive, self.upstreams))
        for upstream, answers in zip(self.upstreams, alive, strict=True):
            if not answers:
                self._mark_down(upstream, "connect")

    async def close(self) -> None:
        self._closing = True
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for upstream in self.upstreams:
            for exchange in list(upstream.open):
                exchange.close()
        if self._session is not None:
            await self._session.close()

    def check(self, call: Call) -> None:
        """What can be answered is for the upstream to say."""

    @property
    def window(self) -> int:
        return sum(upstream.window or UNLIMITED for upstream in self.upstreams if upstream.up)

    def status(self) -> dict[str, Any]:
        up = any(upstream.up for upstream in self.upstreams)
        return {"ok": up, "upstreams": [upstream.status() for upstream in self.upstreams]}

    async def answer(self, call: Call) -> Reply:
        refusal: Reply | ApiError | None = None
        tried: list[Upstream] = []
        while len(tried) <= self._retries and (upstream := self._choose(tried)) is not None:
            tried.append(upstream)
            try:
                reply = await self._ask(upstream, call)
            except Failed as failed:
                if not failed.again:
                    raise failed.error from failed
                refusal = refusal if isinstance(refusal, Reply) else failed.error
            else:
                if reply.status not in _ELSEWHERE:
                    return reply
                refusal = reply
        if isinstance(refusal, Reply):
            return refusal
        raise self._none_up() if refusal is None else refusal

    async def get(self, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> Reply:
        """From the first upstream that is up and answers; ``path`` must be a clean one."""
        call = Call(request_id="", path=path, body=b"", fields={}, headers=headers, samples=0)
        error: ApiError | None = None
        for upstream in self.upstreams:
            if upstream.up:
                try:
                    return await self._ask(upstream, call, method="GET")
                except Failed as failed:
                    error = failed.error
        raise error or self._none_up()

    async def fetch(self, upstream: Upstream, path: str) -> tuple[int, bytes]:
        """Status and body of a GET of our own, with our key; within :data:`PROBE_S`.

        Raises:
            aiohttp.ClientError, OSError: There is no whole answer. That is no reason to mark the upstream down.
        """
        assert self._session is not None, "start() comes first"
        headers = {"connection": "close"}  # calls keep connections of their own
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        async with asyncio.timeout(PROBE_S):
            async with self._session.get(upstream.url(path), headers=headers, allow_redirects=False) as got:
                return got.status, await got.read()

    def _choose(self, tried: Collection[Upstream]) -> Upstream | None:
        """The least loaded that is up: fewest samples for its window, then fewest calls, then not used for longest."""
        able = [upstream for upstream in self.upstreams if upstream.up and upstream not in tried]
        if not able or self._closing:
            return None
        chosen = min(able, key=lambda u: (u.samples / (u.window or UNLIMITED), len(u.open), u.last_used))
        self._calls += 1
        chosen.last_used = self._calls
        return chosen

    async def _ask(self, upstream: Upstream, call: Call, *, method: str = "POST") -> Reply:
        """Raises :class:`Failed`, which has been reported then."""
        headers = request_headers(call.headers, request_id=call.request_id, key=self._key)
        body = call.body if method == "POST" else None
        if call.priority is not None and "header" in self._tag:
            headers = with_header_priority(headers, call.priority)
        if call.priority is not None and call.fields and "body" in self._tag:
            body = with_priority(call.body, call.priority)
        while True:
            exchange = self._exchange(upstream, call, brief=method == "GET")
            try:
                begun = await exchange.send(method, call.path, headers, body)
                return await self._reply(exchange, call, begun=begun)
            except Failed as failed:
                stale = failed.kind == "cut" and exchange.stale
                exchange.close()
                if stale:
                    continue  # by and by on a new connection
                self._note(exchange, call, failed.kind, str(failed), down=failed.down)
                raise
            except BaseException:
                exchange.close()
                raise

    def _exchange(self, upstream: Upstream, call: Call, *, brief: bool) -> Exchange:
        assert self._session is not None, "start() comes first"
        t = self._timeouts
        timeouts = replace(t, first_byte_s=min(t.first_byte_s, PROBE_S)) if brief else t
        return Exchange(upstream, self._session, timeouts, samples=call.samples)

    async def _reply(self, exchange: Exchange, call: Call, *, begun: bool) -> Reply:
        upstream, response = exchange.upstream, exchange.response
        status, headers = response.status, response_headers(response.raw_headers)
        outcome = Outcome(upstream=upstream.name)
        known = call.path in (COMPLETIONS, CHAT)
        good = 200 <= status < 300
        if good and known and response.headers.get("Content-Encoding", "identity") != "identity":
            raise garbage("compressed data, although it was asked not to compress")
        if good and _is_event_stream(response):
            if not begun:
                raise cut_short()
            self._answers(upstream)
            relay = Relay(exchange, outcome, known=known, note=partial(self._note, exchange, call))
            return Reply(status, headers, relay, outcome)
        body = await exchange.read_whole()
        if good and known:
            read_answer(body, outcome, measured=exchange.measured)
            if outcome.failure is not None:
                self._note(exchange, call, outcome.failure, "engine: it answered with an error")
        exchange.close()
        if status == 401 and self._key is not None:
            raise Failed("status", ApiError(502, "The model server refuses the gateway's key.", code="upstream_key"))
        if status in _DOWN and known:  # of other calls it may only say that it cannot do them
            self._note(exchange, call, "status", f"status {status}", down=True)
        else:
            self._answers(upstream)
            if status >= 500 or status == 429:
                self._note(exchange, call, "status", f"status {status}")
        if status >= 400:
            outcome.failure = "status"
        return Reply(status, [*headers, (b"content-length", str(len(body)).encode())], once(body), outcome)

    # Health

    def _note(self, exchange: Exchange, call: Call, kind: str, why: str, *, down: bool = False) -> None:
        """A failure is logged, reported and remembered."""
        upstream = exchange.upstream
        took_s = time.monotonic() - exchange.began_s
        log.warning("upstream %s failed %s after %.1f s: %s", upstream.name, call.request_id, took_s, why)
        upstream.last_failure = kind
        self._reported(upstream.name, kind)
        if down and exchange.began_s >= upstream.up_since_s:
            self._mark_down(upstream, kind)

    def _answers(self, upstream: Upstream) -> None:
        upstream.strikes = 0

    def _mark_down(self, upstream: Upstream, kind: str) -> None:
        upstream.last_failure = kind
        if not upstream.up or self._closing:
            return
        upstream.up = False
        log.warning("upstream %s is down (%s)", upstream.name, kind)
        probe = asyncio.create_task(self._probe(upstream))
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)
        self.changed()

    async def _probe(self, upstream: Upstream) -> None:
        """Until it answers again. ``strikes`` go on counting if it fails at its first call after that."""
        while True:
            upstream.strikes += 1
            wait_s = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** min(upstream.strikes - 1, 10)) * random.uniform(0.75, 1.0)
            upstream.next_probe_s = time.monotonic() + wait_s
            await asyncio.sleep(wait_s)
            if await self._alive(upstream):
                break
        upstream.up, upstream.up_since_s = True, time.monotonic()
        log.warning("upstream %s is up again", upstream.name)
        self.changed()

    async def _alive(self, upstream: Upstream) -> bool:
        """Whether it answers at all, and not with a server error."""
        for path in ("/health", "/v1/models"):
            try:
                status, _ = await self.fetch(upstream, path)
            except Exception:  # whatever it is, the probing must go on
                return False
            if status not in _NOT_THERE:
                return status < 500
        return True

    def _none_up(self) -> ApiError:
        wait_s = min(upstream.next_probe_s for upstream in self.upstreams) - time.monotonic()
        text = "No model server can be reached at the moment."
        return ApiError(503, text, code="no_upstream", retry_after_s=max(1.0, wait_s))


def _is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return response.headers.get("Content-Type", "").lower().startswith("text/event-stream")


def _tls_context(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file}: no usable file of certificate authorities: {error}") from error


async def _on_new_connection(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    _connected(context, reused=False)


async def _on_kept_connection(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    _connected(context, reused=True)


def _connected(context: SimpleNamespace, *, reused: bool) -> None:
    if isinstance(exchange := context.trace_request_ctx, Exchange):
        exchange.connected(reused=reused)
