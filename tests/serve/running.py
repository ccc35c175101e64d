"""A front door on a real port, in a thread with its own loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx

from longtail.serve.front import FrontDoor
from longtail.serve.http import Listen, serve

client = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
"""For all tests: making one takes as long as a hundred requests, because it reads the system's certificates."""


@dataclass
class Running:
    """``stop()`` begins a graceful end, as SIGTERM does; ``ended`` is set once it is over."""

    url: str
    door: FrontDoor
    stop: Callable[[], None]
    ended: threading.Event

    def metric(self, name: str, **labels: str) -> float:
        """A figure of ``/metrics``; 0 if it is not there."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        for line in client.get(self.url + "/metrics").text.splitlines():
            found, _, value = line.rpartition(" ")
            if found.split("{")[0] == name and all(w in found for w in wanted):
                return float(value)
        return 0.0


@contextlib.contextmanager
def running(make: Callable[[], FrontDoor], *, listen: Listen | None = None) -> Iterator[Running]:
    """``make`` is called in the door's own loop."""
    ready: Future[tuple[Any, ...]] = Future()
    ended = threading.Event()

    async def main() -> None:
        door = make()
        loop = asyncio.get_running_loop()

        def is_ready(url: str, stop: Callable[[], None]) -> None:
            ready.set_result((url, door, lambda: loop.call_soon_threadsafe(stop)))

        await serve(door, listen or Listen(port=0), ready=is_ready)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url, door, stop = ready.result(timeout=300)
    try:
        yield Running(url, door, stop, ended)
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            stop()
        assert ended.wait(120), "the server did not end"


def half_request(url: str, **body: Any) -> socket.socket:
    """A socket with a request sent and the answer not read."""
    host, port = url.removeprefix("http://").split(":")
    text = json.dumps({"model": "m", "prompt": "rank 0.5", **body}).encode()
    sock = socket.create_connection((host, int(port)))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
    return sock


def until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Wait for a condition that another thread brings about."""
    pause = threading.Event()
    for _ in range(round(within_s / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"did not come true within {within_s} s")
