"""The thread that owns the engine, and how the event loop talks to it.

The loop puts additions and abortions into an inbox; the thread takes them between two steps, steps while there is work
and sleeps otherwise. What a step brought is handed to the loop in one go. Invariants:

* A request ends for its caller exactly once: with its completions, with an error, or by :meth:`Run.cancel`.
* An aborted request has no lanes in the next step.
* An exception in a step fails the requests that were in the engine, and no others; a new engine takes its place, so
  that nothing half done remains.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from longtail.core.errors import CapacityError, RequestError
from longtail.core.types import Completion, Emitted, Request
from longtail.engine.engine import Engine
from longtail.serve.errors import ApiError

log = logging.getLogger("longtail.serve")

FAILURES = 3
"""So many failed steps without a token between them, and the engine counts as broken."""
JOIN_S = 60.0
"""How long a shutdown waits for the step under way."""


class Load(NamedTuple):
    """What the engine is doing; ``running`` and ``waiting`` in samples."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class News:
    """What happened to a run: tokens in order, and samples that ended with them, by position of the request in it."""

    emitted: list[tuple[int, Emitted]] = field(default_factory=list)
    completions: list[tuple[int, Completion]] = field(default_factory=list)


class Run:
    """Requests of one caller, who reads :meth:`news` until all samples have ended, or cancels. Belongs to the loop."""

    def __init__(self, requests: Sequence[Request], abort: Callable[[list[str]], None]) -> None:
        self.ids = [request.request_id for request in requests]
        self.open = sum(request.samples for request in requests)
        """Samples of which the end has not been read."""
        self._abort = abort
        self._news = News()
        self._failure: ApiError | None = None
        self._changed = asyncio.Event()

    async def news(self) -> News:
        """What is new, once something is. Raises :class:`ApiError` if the run has failed, after what came before."""
        await self._changed.wait()
        if self._failure is None:
            self._changed.clear()
        elif not self._news.emitted:
            raise self._failure
        news, self._news = self._news, News()
        self.open -= len(news.completions)
        return news

    def cancel(self) -> None:
        """The rest is not wanted. Harmless when there is no rest."""
        self._abort(self.ids)

    def _tell(self, position: int, emitted: Emitted | None = None, completion: Completion | None = None) -> None:
        if emitted is not None:
            self._news.emitted.append((position, emitted))
        if completion is not None:
            self._news.completions.append((position, completion))
        self._changed.set()

    def _fail(self, error: ApiError) -> None:
        self._failure = error
        self._changed.set()


@dataclass(slots=True)
class _Entry:
    """A request that has not ended, as the loop sees it."""

    run: Run
    position: int
    open: int


class EngineThread:
    """``make_engine`` is called in the thread, at first and after a failure. All methods belong to one event loop."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._entries: dict[str, _Entry] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        # Shared with the thread
        self._wake = threading.Condition()
        self._inbox: list[Request | str] = []
        """Requests to add, and ids of those to abort."""
        self._closing = False
        self._failures = 0
        self.load = Load()

    # In the event loop

    async def start(self) -> None:
        """Raises whatever ``make_engine`` raises."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._ready

    async def close(self) -> None:
        """Stop after the step under way; what still runs fails with 503."""
        self._send(closing=True)
        self._fail(list(self._entries), ApiError(503, "The server is shutting down.", code="shutting_down"))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_S)

    @property
    def healthy(self) -> bool:
        return self.alive and self._failures < FAILURES

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def submit(self, requests: Sequence[Request]) -> Run:
        """Their ids must be new. Raises :class:`ApiError` (503) if the engine is gone; what is wrong with a request
        comes out of :meth:`Run.news`."""
        if not self.alive:
            raise ApiError(503, "The engine has stopped; the server must be restarted.", code="engine_stopped")
        run = Run(requests, self._abort)
        for position, request in enumerate(requests):
            self._entries[request.request_id] = _Entry(run, position, request.samples)
        self._send(requests)
        return run

    def _abort(self, ids: Iterable[str]) -> None:
        gone = [request_id for request_id in ids if self._entries.pop(request_id, None) is not None]
        if gone:
            self._send(gone)

    def _send(self, commands: Iterable[Request | str] = (), *, closing: bool = False) -> None:
        with self._wake:
            self._inbox += commands
            self._closing |= closing
            self._wake.notify()

    def _deliver(self, emitted: list[Emitted], completions: list[Completion]) -> None:
        entries = self._entries
        for token in emitted:
            entry = entries.get(token.request_id)
            if entry is not None:
                entry.run._tell(entry.position, emitted=token)
        for completion in completions:
            entry = entries.get(completion.request_id)
            if entry is not None:
                entry.run._tell(entry.position, completion=completion)
                entry.open -= 1
                if entry.open == 0:
                    del entries[completion.request_id]

    def _fail(self, ids: Sequence[str], error: ApiError) -> None:
        """End the runs that these requests belong to."""
        for run in {id(entry.run): entry.run for i in ids if (entry := self._entries.get(i)) is not None}.values():
            run._fail(error)
            self._abort(run.ids)

    def _started(self, error: Exception | None) -> None:
        if not self._ready.done():
            if error is None:
                self._ready.set_result(None)
            else:
                self._ready.set_exception(error)

    # In the thread

    def _main(self) -> None:
        try:
            self._engine = self._make_engine()
        except Exception as error:
            self._post(self._started, error)
            return
        self._post(self._started, None)
        try:
            while (commands := self._take()) is not None:
                for command in commands:
                    self._apply(command)
                if self._engine.has_work:
                    self._step()
                self._note_load()
        except Exception:
            log.exception("the engine's thread ends")
        finally:
            self._closing = True
            self._post(self._fail_all)

    def _fail_all(self) -> None:
        self._fail(list(self._entries), ApiError(500, "The engine has stopped.", code="engine_failure"))

    def _take(self) -> list[Request | str] | None:
        """What is in the inbox; waits for it while there is nothing else to do. None means the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._inbox or self._closing or self._engine.has_work)
            commands, self._inbox = self._inbox, []
            return None if self._closing else commands

    def _apply(self, command: Request | str) -> None:
        if isinstance(command, str):
            self._engine.abort(command)
            return
        try:
            self._engine.add(command)
        except (RequestError, CapacityError) as error:
            reason = str(error).removeprefix(f"request {command.request_id!r}").lstrip(": ")
            self._post(self._fail, [command.request_id], ApiError(400, reason, code="invalid_value"))

    def _step(self) -> None:
        try:
            result = self._engine.step()
        except Exception:
            log.exception("the engine failed in a step")
            ids = self._engine.request_ids
        else:
            if result.emitted:
                self._failures = 0
                self._post(self._deliver, result.emitted, result.completions)
            return
        self._failures += 1
        del self._engine  # before the next one, which needs the memory
        self._engine = self._make_engine()
        error = ApiError(500, "The engine failed while it worked on this request.", code="engine_failure")
        self._post(self._fail, ids, error)

    def _note_load(self) -> None:
        engine, lanes = self._engine, self._engine.lanes
        self.load = Load(engine.running, engine.waiting, lanes.used, lanes.total, engine.preemptions)

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has gone without close()
            self._closing = True
