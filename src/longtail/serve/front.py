"""The front door: what every request goes through, whoever answers it in the end.

    key -> body -> rank -> wait for a turn -> backend -> relay -> account

Invariants:

* A request gets exactly one answer or one clear error; none is repeated once a byte of an answer has gone out.
* A failure of the ranker costs the order, never the request: it goes through in order of arrival, and is counted.
* When the client goes away, its request leaves the queue or is cancelled at the backend.
* Neither keys nor prompts are logged: a prompt appears as its length and a hash that is keyed anew for every process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longtail import __version__
from longtail.core.errors import ConfigError
from longtail.planner.deadline import HEAD_START_S, MOST_HEAD_START_S, as_priority, of_priority, virtual_deadline
from longtail.serve.accounts import Accounts, Active
from longtail.serve.asgi import ClientGone, Receive, Scope, Send, header, read_body, while_connected
from longtail.serve.body import given_priority, parse, prompts_of, samples_of, with_priority
from longtail.serve.calls import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Backend, Call, Headers
from longtail.serve.errors import ApiError
from longtail.serve.hold import Draining, Hold
from longtail.serve.keys import ANONYMOUS, ApiKey, Keys
from longtail.serve.metrics import GaugeValue, Metrics
from longtail.serve.queue import QueueFull
from longtail.serve.record import Recorder
from longtail.serve.responder import Responder
from longtail.serve.scoring import Scorer

log = logging.getLogger("longtail.serve")

GENERATING = frozenset({COMPLETIONS, CHAT})
"""What every backend is asked for."""
ELSEWHERE = frozenset({RESPONSES, MESSAGES})
"""What upstream servers may be able to answer too; ordered like the others."""
PASSED = frozenset(
    f"/v1/{name}"
    for name in (
        "embeddings", "rerank", "score", "classify", "pooling", "moderations", "tokenize", "detokenize",
        "audio/transcriptions", "audio/translations", "audio/speech", "images/generations",
    )
)  # fmt: skip
"""What is handed to an upstream as it is, at once. A list, because servers have administration under /v1 too."""
HEALTH, LIVE = "/health", "/live"
OPEN_PATHS = (HEALTH, LIVE)
CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
PRIORITY_HEADER = b"x-vllm-priority"
MOST_HELD_BYTES = 1 << 30
"""Of the bodies of all requests that wait."""
_MODEL_PATH = re.compile(r"/v1/models(/[A-Za-z0-9_-][A-Za-z0-9_.:-]*)+")
"""No dots at the start of a part: a path must not climb out of /v1/models at the upstream."""


@dataclass(frozen=True, kw_only=True)
class DoorSettings:
    """How requests are let in.

    ``ranked``: by predicted length (else in order of arrival). ``tag``: tell the backend a priority. ``head_start_s``:
    H of ``planner/deadline.py``. ``trust_priority``: without keys, a client's own priority counts. ``body_limit`` in
    bytes, to arrive ``body_within_s``. ``comment_s``: interval of comment lines for streams that wait, None for none.
    ``drain_s``: how long a shutdown waits for what is under way. ``open_metrics``: ``/metrics`` needs no key.
    """

    ranked: bool = True
    tag: bool = False
    head_start_s: float = HEAD_START_S
    trust_priority: bool = False
    body_limit: int = 32 * 2**20
    body_within_s: float = 60.0
    comment_s: float | None = None
    drain_s: float = 300.0
    open_metrics: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.head_start_s <= MOST_HEAD_START_S:
            raise ConfigError(f"--max-head-start {self.head_start_s:g}: from 0 to {MOST_HEAD_START_S:,.0f} seconds")


class FrontDoor:
    """An ASGI application over ``backend``. :meth:`start` before the first request, :meth:`close` after the last."""

    def __init__(
        self,
        backend: Backend,
        hold: Hold,
        *,
        settings: DoorSettings,
        keys: Keys | None = None,
        recorder: Recorder | None = None,
        document: dict[str, Any] | None = None,
        passes_through: bool = False,
    ) -> None:
        self.backend, self.hold, self.settings = backend, hold, settings
        self.scorer: Scorer | None = None
        """Set before :meth:`start`; None lets all through in order of arrival."""
        self._keys, self._recorder = keys, recorder
        self._document = document or {}
        self._passes_through = passes_through
        self._generating = GENERATING | ELSEWHERE if passes_through else GENERATING
        self.metrics = Metrics(self._gauges)
        self.accounts = Accounts(self.metrics, recorder, in_flight=lambda: hold.in_flight)
        self.draining = False
        self._stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._held_bytes = 0

    async def start(self) -> None:
        """Raises ``LongtailError`` if the backend can never answer."""
        if self.scorer is not None:
            self.scorer.start()
        await self.backend.start()

    async def close(self) -> None:
        try:
            await self.backend.close()
        finally:
            if self.scorer is not None:
                self.scorer.close()
            if self._recorder is not None:
                self._recorder.close()

    def not_scored(self, reason: str) -> None:
        """A request goes through without a rank."""
        self.metrics.unscored.labels(reason).inc()

    # Shutdown

    def drain(self) -> None:
        """Refuse what is new and finish what is under way; after ``drain_s`` seconds the rest ends with an error."""
        if self.draining:
            return
        self.draining = True
        self.hold.drain()
        log.warning("draining: %d requests under way", len(self.accounts.active))
        asyncio.get_running_loop().call_later(self.settings.drain_s, self._stop)

    def _stop(self) -> None:
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    # Routing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no handler for {scope['type']} connections")
        request_id = f"req-{secrets.token_hex(12)}"
        responder = Responder(send, [(b"x-request-id", request_id.encode())])
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = ANONYMOUS.name
        try:
            key = self._authenticate(scope)
            client = key.name
            await self._route(scope, receive, responder, key, request_id)
        except ApiError as error:
            await responder.error(error)
        except ClientGone:
            self.metrics.gone.labels(client).inc()
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            await responder.error(_shutting_down())
        except Exception:
            log.exception("%s failed inside", request_id)
            await responder.error(ApiError(500, "The server failed; its log has more.", code="internal_error"))
        finally:
            self._tasks.discard(task)
            if responder.status is not None:
                path = scope["path"] if scope["path"] in self._generating else "other"
                self.metrics.requests.labels(client, path, str(responder.status)).inc()

    async def _route(self, scope: Scope, receive: Receive, responder: Responder, key: ApiKey, request_id: str) -> None:
        method, path = scope["method"], scope["path"]
        if path in self._generating:
            _only(method, "POST")
            await self._generate(scope, receive, responder, key, request_id)
        elif path == "/v1/models" or _MODEL_PATH.fullmatch(path):
            _only(method, "GET")
            reply = await self.backend.get(path, tuple(self._forwarded(scope, key)))
            await while_connected(receive, responder.relay(reply))
        elif path in OPEN_PATHS:
            _only("GET" if method == "HEAD" else method, "GET")
            status, found = self._health() if path == HEALTH else (200, {"ok": True})
            if not self._knows(scope):
                found = {"ok": found["ok"]}
            await responder.whole(status, _JSON, json.dumps(found).encode())
        elif path == "/metrics":
            _only(method, "GET")
            self.accounts.tick()
            await responder.whole(200, [(b"content-type", b"text/plain; version=0.0.4")], self.metrics.text())
        elif path == "/openapi.json":
            _only(method, "GET")
            await responder.whole(200, _JSON, json.dumps(self._document).encode())
        elif self._passes_through and path in PASSED:
            _only(method, "POST")
            await self._pass(scope, receive, responder, key, request_id)
        else:
            raise ApiError(404, f"There is no {method} {path[:80]!r} here.", code="not_found")

    def _authenticate(self, scope: Scope) -> ApiKey:
        """The caller's key; who asks whether it lives (and for metrics, if they are open) needs none."""
        open_ = scope["path"] in OPEN_PATHS or (scope["path"] == "/metrics" and self.settings.open_metrics)
        if self._keys is None or open_:
            return ANONYMOUS
        own = header(scope, b"x-api-key")  # Anthropic's clients
        return self._keys.authenticate(header(scope, b"authorization") if own is None else b"Bearer " + own)

    def _knows(self, scope: Scope) -> bool:
        """Whether the caller has a key, where keys are needed."""
        try:
            return self._keys is None or bool(self._authenticate({**scope, "path": ""}))
        except ApiError:
            return False

    # Requests

    async def _generate(
        self, scope: Scope, receive: Receive, responder: Responder, key: ApiKey, request_id: str
    ) -> None:
        arrival_s = time.monotonic()
        self._refuse_when_draining()
        body = await self._body(scope, receive)
        call = self._call(scope, key, body, parse(body), request_id, arrival_s)
        if call.fields.get("background"):
            raise ApiError(400, "Background responses cannot be fetched here.", code="unsupported", param="background")
        call = replace(call, checked=self.backend.check(call))
        given = self._given(scope, key, call.fields)
        await while_connected(receive, self._serve(call, key, given, responder))

    async def _pass(self, scope: Scope, receive: Receive, responder: Responder, key: ApiKey, request_id: str) -> None:
        """Other calls of the API (embeddings, ...): at once, and as they are but for a priority that does not count."""
        self._refuse_when_draining()
        body = await self._body(scope, receive)
        is_json = (header(scope, b"content-type") or b"application/json").startswith(b"application/json")
        fields = parse(body) if is_json else {}
        call = self._call(scope, key, body, fields, request_id, time.monotonic())
        call = self._ordered(call, self._given(scope, key, fields))

        async def answer() -> None:
            await responder.relay(await self.backend.answer(call))

        await while_connected(receive, answer())

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise _shutting_down()

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        s = self.settings
        return await read_body(scope, receive, limit=s.body_limit, within_s=s.body_within_s)

    def _call(
        self, scope: Scope, key: ApiKey, body: bytes, fields: dict[str, Any], request_id: str, arrival_s: float
    ) -> Call:
        path = scope["path"]
        if "priority" in fields and not self._trusts(key):
            body = with_priority(body, None)
        return Call(
            request_id=request_id,
            path=path,
            body=body,
            fields=fields,
            headers=tuple(self._forwarded(scope, key)),
            client=key.name,
            prompts=prompts_of(path, fields),
            stream=fields.get("stream") is True,
            samples=samples_of(path, fields),
            arrival_s=arrival_s,
        )

    def _given(self, scope: Scope, key: ApiKey, fields: Mapping[str, Any]) -> int | None:
        """The client's own priority, where it counts."""
        return given_priority(fields, header(scope, PRIORITY_HEADER)) if self._trusts(key) else None

    def _trusts(self, key: ApiKey) -> bool:
        return key.allow_priority or (self._keys is None and self.settings.trust_priority)

    def _forwarded(self, scope: Scope, key: ApiKey) -> Iterable[tuple[bytes, bytes]]:
        """The client's headers for the next server; with keys of our own, never the client's credentials."""
        for name, value in scope["headers"]:
            if name == b"cookie" or name.startswith((b"x-forwarded-", b"forwarded")):
                continue
            if name in CREDENTIALS and self._keys is not None:
                continue
            if name == PRIORITY_HEADER and not self._trusts(key):
                continue
            yield name, value

    async def _serve(self, call: Call, key: ApiKey, given: int | None, responder: Responder) -> None:
        call = self._ordered(replace(call, quantile=await self._quantile(call)), given)
        with self.accounts.open(call, keep_prompt=self._keys is None or key.record_prompts) as active:
            try:
                await self._in_turn(active, key, responder)
            except ApiError as error:
                active.status, active.refusal = error.status, error.code
                raise
            finally:
                active.status = active.status or responder.status

    async def _in_turn(self, active: Active, key: ApiKey, responder: Responder) -> None:
        call = active.call
        most = self._most_waiting(key)
        if self.hold.queue.waiting(key.name) >= most:
            raise self._full(f"Key {key.name} has {most} requests waiting, which is its limit.")
        held_bytes = len(call.body)
        if self._held_bytes + held_bytes > MOST_HELD_BYTES:
            raise self._full("The requests that wait are too large together.")
        turn = self.hold.turn(
            client=key.name,
            weight=key.weight,
            deadline_s=call.deadline_s,
            cost=active.expected,
            places=call.samples,
            max_concurrent=key.max_concurrent,
        )
        if self.settings.comment_s is not None and call.stream:
            responder.comment_every(self.settings.comment_s)
        self._held_bytes += held_bytes
        try:
            async with turn as mine:
                self._held_bytes -= held_bytes
                held_bytes = 0
                active.waited_s = mine.waited_s
                self.metrics.overdue.inc(mine.overdue)
                reply = await self.backend.answer(call)
                outcome = active.outcome = reply.outcome
                try:
                    await responder.relay(reply)
                finally:
                    tokens = outcome.output_tokens or outcome.streamed_tokens
                    if tokens:
                        mine.settle(tokens)
        except QueueFull:
            raise self._full("The queue is full.") from None
        except Draining:
            raise _shutting_down() from None
        finally:
            self._held_bytes -= held_bytes
            await responder.close()

    def _most_waiting(self, key: ApiKey) -> int:
        """One of several keys cannot fill the queue for the others."""
        limit = self.hold.queue.limit
        return key.max_waiting or (limit if self._keys is None or len(self._keys) == 1 else max(1, limit // 2))

    async def _quantile(self, call: Call) -> float | None:
        if self.scorer is None or not self.settings.ranked:
            return None
        started = time.perf_counter()
        quantile = await self.scorer.quantile(call.prompts)
        self.metrics.scoring.observe(time.perf_counter() - started)
        return quantile

    def _ordered(self, call: Call, given: int | None) -> Call:
        # Priorities are on the wall clock, which other gateways have too; the order here must not jump with it.
        wall_s = time.time() - time.monotonic()
        if given is not None:
            priority = given if self.settings.tag else None
            return replace(call, deadline_s=of_priority(given) - wall_s, priority=priority)
        head_start_s = self.settings.head_start_s if self.settings.ranked else 0.0
        deadline_s = virtual_deadline(call.arrival_s, call.quantile, head_start_s=head_start_s)
        priority = as_priority(deadline_s + wall_s) if self.settings.tag else None
        return replace(call, deadline_s=deadline_s, priority=priority)

    def _full(self, problem: str) -> ApiError:
        seconds = self.accounts.seconds_for(self.hold.queue.cost)
        wait_s = 1.0 if seconds is None else min(60.0, max(1.0, seconds / 2))
        return ApiError(429, f"{problem} Try again in {wait_s:.0f} s.", code="queue_full", retry_after_s=wait_s)

    def _health(self) -> tuple[int, dict[str, Any]]:
        backend = self.backend.status()
        ok = bool(backend.get("ok")) and not self.draining
        found = {
            "ok": ok,
            "version": __version__,
            "draining": self.draining,
            "order": self._order(backend),
            "mode": "tag" if self.settings.tag else "hold",
            "max_head_start_s": self.settings.head_start_s,
            "waiting": len(self.hold.queue),
            "in_flight": self.hold.in_flight,
            "backend": backend,
        }
        return (200 if ok else 503), found

    def _order(self, backend: dict[str, Any]) -> str:
        """What can be claimed of the order: a tag changes nothing where priorities are ignored."""
        if not self.settings.ranked:
            return "fcfs"
        ignoring = [u["url"] for u in backend.get("upstreams", ()) if u.get("priorities_ignored")]
        return f"fcfs: priorities are ignored by {', '.join(ignoring)}" if ignoring else "ranked"

    def _gauges(self) -> Iterable[GaugeValue]:
        """What is known at a scrape and not counted as it happens."""
        yield "longtail_waiting", "Requests held back here", {}, float(len(self.hold.queue))
        yield "longtail_in_flight", "Samples at the backend", {}, float(self.hold.in_flight)
        window = None if self.settings.tag else float(self.backend.window)
        yield "longtail_window", "Samples that may be at the backend at once", {}, window
        yield "longtail_oldest_wait_seconds", "Longest wait of those held back", {}, self.hold.oldest_s() or 0.0
        yield "longtail_draining", "1 while shutting down", {}, float(self.draining)
        yield from self.accounts.gauges()
        for upstream in self.backend.status().get("upstreams", ()):
            which = {"upstream": upstream["url"]}
            yield "longtail_upstream_up", "1 if it can be used", which, float(upstream["up"])
            ignored = upstream.get("priorities_ignored")
            text = "1 if the order of its answers shows that it ignores priorities"
            yield "longtail_priorities_ignored", text, which, None if ignored is None else float(ignored)


_JSON: Headers = [(b"content-type", b"application/json")]


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise ApiError(405, f"Only {allowed} works here.", code="method_not_allowed")


def _shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down.", code="shutting_down", retry_after_s=5)
