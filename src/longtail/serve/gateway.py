"""The front door over upstream servers, and what looks after them: windows that find the servers' capacity, and whether
priorities are heeded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from longtail.serve.build import Options, front_door
from longtail.serve.front import FrontDoor
from longtail.serve.policy import probe
from longtail.serve.upstream import Timeouts, Upstream
from longtail.serve.upstreams import Upstreams
from longtail.serve.window import FIRST, Window, read_load

log = logging.getLogger("longtail.serve")

LOOK_EVERY_S = 0.5


class Gateway(Upstreams):
    """Upstreams whose windows are found out while they serve (``auto``), and asked at the start whether they heed
    priorities (``tag`` not empty)."""

    def __init__(self, urls: Sequence[str], *, auto: bool, probes: bool, **settings: object) -> None:
        super().__init__(urls, reported=self.report, **settings)  # type: ignore[arg-type]
        self.door: FrontDoor | None = None
        self._auto, self._probes_policy = auto, probes
        self._windows = {upstream.name: Window() for upstream in self.upstreams}
        self._blind: set[str] = set()
        self._looking: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await super().start()
        if self._probes_policy:
            for upstream in self.upstreams:
                await self._say_policy(upstream)
        if self._auto:
            self._looking = [asyncio.create_task(self._look_after(upstream)) for upstream in self.upstreams]

    async def close(self) -> None:
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        await super().close()

    def report(self, url: str, kind: str) -> None:
        """Count a failed exchange."""
        if self.door is not None:
            self.door.metrics.failures.labels(url, kind).inc()

    async def _say_policy(self, upstream: Upstream) -> None:
        found = await probe(upstream.name, lambda path: self.fetch(upstream, path))
        log.log(logging.WARNING if found.warn else logging.INFO, found.message)

    async def _look_after(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not upstream.up or not upstream.samples:
                continue
            try:
                status, body = await self.fetch(upstream, "/metrics")
            except Exception as error:
                log.info("%s/metrics: %s", upstream.name, type(error).__name__)
                continue
            load = read_load(body.decode(errors="replace")) if status == 200 else None
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
        probes=tag,
        timeouts=timeouts,
        window=0 if tag else window or FIRST,
        key=key,
        tag=frozenset({"body", "header"}) if tag else frozenset(),
        ca_file=ca_file,
    )
    door = front_door(upstreams, options, title="longtail gateway", passes_through=True)
    upstreams.door = door
    upstreams.changed = door.hold.release
    if tag and options.keys is not None:
        log.warning("Weights of keys have no effect with --mode tag: the upstream orders. Use --mode hold for them.")
    return door
