"""The front door over upstream servers, and what looks after them: windows that find the servers' capacity, and whether
priorities are heeded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from longtail.serve.build import Options, front_door
from longtail.serve.calls import Call, Chunks, Reply
from longtail.serve.front import FrontDoor
from longtail.serve.policy import OrderWatch, probe
from longtail.serve.upstream import Timeouts, Upstream
from longtail.serve.upstreams import Upstreams
from longtail.serve.window import FIRST, Window, read_load

log = logging.getLogger("longtail.serve")

LOOK_EVERY_S = 0.5


class Gateway(Upstreams):
    """Upstreams whose windows are found out while they serve (``auto``), and of which it is found out whether they heed
    priorities (``tags``): by asking at the start, and by the order of first tokens."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        auto: bool,
        tags: bool,
        head_start_s: float,
        timeouts: Timeouts,
        window: int,
        key: str | None,
        ca_file: Path | None,
    ) -> None:
        tag = frozenset({"body", "header"}) if tags else frozenset[str]()
        super().__init__(
            urls, timeouts=timeouts, window=window, key=key, tag=tag, ca_file=ca_file, reported=self.report
        )
        self.door: FrontDoor | None = None
        self._auto, self._tags, self._head_start_s = auto, tags, head_start_s
        self._told: dict[str, bool | None] = {}
        self._watches = {upstream.name: OrderWatch() for upstream in self.upstreams} if tags else {}
        self._windows = {upstream.name: Window() for upstream in self.upstreams}
        self._blind: set[str] = set()
        self._looking: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await super().start()
        if self._tags:
            for upstream in self.upstreams:
                await self._say_policy(upstream)
        if self._auto:
            self._looking = [asyncio.create_task(self._look_after(upstream)) for upstream in self.upstreams]

    async def close(self) -> None:
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        await super().close()

    def status(self) -> dict[str, Any]:
        found = super().status()
        for shown in found["upstreams"]:
            if shown["url"] in self._watches:
                shown["priorities_ignored"] = self._ignored(shown["url"])
        return found

    def _ignored(self, url: str) -> bool | None:
        """What is seen of it counts more than what it says; None if neither tells."""
        seen, heeds = self._watches[url].ignored, self._told.get(url)
        return seen if seen is not None or heeds is None else not heeds

    async def _ask(self, upstream: Upstream, call: Call, *, method: str = "POST") -> Reply:
        watch = self._watches.get(upstream.name)
        if watch is None or not call.stream:
            return await super()._ask(upstream, call, method=method)
        watch.sent(call.request_id, call.arrival_s, call.deadline_s)
        try:
            reply = await super()._ask(upstream, call, method=method)
        except BaseException:
            watch.gone(call.request_id)
            raise
        if reply.status != 200:
            watch.gone(call.request_id)
            return reply
        watch.first_token(call.request_id, time.monotonic())  # the reply of a stream begins with its first bytes
        reply.chunks = _Then(reply.chunks, lambda: watch.gone(call.request_id))
        return reply

    def report(self, url: str, kind: str) -> None:
        """Count a failed exchange."""
        if self.door is not None:
            self.door.metrics.failures.labels(url, kind).inc()

    async def _say_policy(self, upstream: Upstream) -> None:
        found = await probe(upstream.name, lambda path: self.fetch(upstream, path), head_start_s=self._head_start_s)
        self._told[upstream.name] = found.heeds
        log.log(logging.WARNING if found.warn else logging.INFO, found.message)

    async def _look_after(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not upstream.up or not upstream.samples:
                continue
            try:
                status, body = await self.fetch(upstream, "/metrics")
                load = read_load(body.decode(errors="replace")) if status == 200 else None
            except Exception as error:
                log.info("%s/metrics: %s", upstream.name, type(error).__name__)
                continue
            if load is None:
                self._say_blind(upstream)
                continue
            assert self.door is not None
            held = len(self.door.hold.queue)
            upstream.window = self._windows[upstream.name].look(load, in_flight=upstream.samples, held=held)
            self.changed()

    def _say_blind(self, upstream: Upstream) -> None:
        if upstream.name not in self._blind:
            self._blind.add(upstream.name)
            log.warning(
                "%s does not publish how many requests run and wait there: its window stays %d. Say --window N, the "
                "size of its batch.",
                upstream.name,
                upstream.window,
            )


class _Then:
    """Chunks that say when they are closed."""

    def __init__(self, chunks: Chunks, closed: Callable[[], None]) -> None:
        self._chunks, self._closed = chunks, closed

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        self._closed()
        await self._chunks.aclose()


def gateway_door(
    urls: Sequence[str],
    options: Options,
    *,
    window: int | None,
    timeouts: Timeouts,
    key: str | None = None,
    ca_file: Path | None = None,
) -> FrontDoor:
    """``window``: answers in flight at each upstream, None to find it out. To be called in the loop that will serve.

    Raises ``LongtailError`` for addresses, files or options that cannot work.
    """
    tag = options.door.tag
    upstreams = Gateway(
        urls,
        auto=window is None and not tag,
        tags=tag,
        head_start_s=options.door.head_start_s,
        timeouts=timeouts,
        window=0 if tag else window or FIRST,
        key=key,
        ca_file=ca_file,
    )
    door = front_door(upstreams, options, title="longtail gateway", passes_through=True)
    upstreams.door = door
    upstreams.changed = door.hold.release
    if tag and options.keys is not None:
        log.warning("Weights of keys have no effect with --mode tag: the upstream orders. Use --mode hold for them.")
    return door
