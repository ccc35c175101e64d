"""How every job stands, folded from the run's events; asked from any thread."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from longtail.core.events import Event, PipelineEnded, PipelineStarted
from longtail.jobs.wire import JobStatus, State
from longtail.observe.live import RunView
from longtail.observe.views import PipelineView

STATES: dict[str, State] = {
    "waiting": "waiting",
    "running": "running",
    "finished": "finished",
    "failed": "failed",
    "interrupted": "stopped",
}


Value = TypeVar("Value")


@dataclass
class _Entry:
    """``expected``: submitted, and no event of it has come since; ``ending``: asked to stop."""

    state: State
    since: float
    steps: int | None = None
    expected: bool = False
    ending: bool = False


class Board:
    """A sink, and a list. ``earlier`` are the events of the run folder's earlier starts.

    ``on_ended(name, reason)`` is called in the thread that writes, after the end is on the board.
    """

    def __init__(
        self, earlier: Iterable[Event] = (), *, on_ended: Callable[[str, str], None] = lambda *_: None
    ) -> None:
        self.on_ended = on_ended
        self._view = RunView()
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        for event in earlier:
            self._fold(event)
        for entry in self._entries.values():  # killed, or interrupted: whoever goes on will say so
            if entry.state in ("waiting", "running"):
                entry.state = "stopped"

    @contextlib.contextmanager
    def expecting(self, steps: Mapping[str, int], *, fresh: bool) -> Iterator[None]:
        """Jobs of so many steps are admitted; what is known from an earlier time under these names is past, or
        (``fresh``) void. If the ``with`` raises, none of them has come."""
        with self._lock:
            entries, views = dict(self._entries), dict(self._view.pipelines)
            for name, count in steps.items():
                if fresh:
                    self._view.pipelines.pop(name, None)
                self._entries[name] = _Entry("waiting", time.time(), steps=count, expected=True)
        try:
            yield
        except BaseException:
            with self._lock:
                for name in steps:
                    _put_back(self._entries, name, entries)
                    _put_back(self._view.pipelines, name, views)
            raise

    def ending(self, name: str) -> None:
        """A job has been asked to stop."""
        with self._lock:
            self._entries[name].ending = True

    def write(self, event: Event) -> None:
        with self._lock:
            self._fold(event)
        if isinstance(event, PipelineEnded):
            self.on_ended(event.pipeline, event.reason)

    def close(self) -> None:
        pass

    def names(self) -> list[str]:
        with self._lock:
            return list(self._entries)

    def job(self, name: str) -> JobStatus:
        """Raises ``KeyError`` if there never was such a job."""
        with self._lock:
            return self._status(name, self._entries[name])

    def jobs(self) -> list[JobStatus]:
        with self._lock:
            return [self._status(name, entry) for name, entry in self._entries.items()]

    def _fold(self, event: Event) -> None:
        self._view.apply(event)
        name = getattr(event, "pipeline", None)
        if not name or name not in self._view.pipelines:
            return
        entry = self._entries.setdefault(name, _Entry("waiting", event.t))
        if isinstance(event, PipelineStarted | PipelineEnded):
            entry.expected = False
        entry.ending = entry.ending and not isinstance(event, PipelineEnded)
        state = "waiting" if entry.expected else STATES[self._view.pipelines[name].status]
        if state != entry.state:
            entry.state, entry.since = state, event.t

    def _status(self, name: str, entry: _Entry) -> JobStatus:
        view = self._view.pipelines.get(name, PipelineView(name))
        over = entry.state not in ("waiting", "running")
        reward = view.metrics.get("reward_mean", math.nan) if view.done else math.nan
        return JobStatus(
            name=name,
            state="ending" if entry.ending and not over else entry.state,
            stage=None if over else view.stage,
            step=view.step,
            steps=entry.steps if entry.steps is not None else view.steps,
            reward=reward if math.isfinite(reward) else None,
            since=entry.since,
            error=None if entry.expected else view.error,
            checkpoint=view.checkpoint,
        )


def _put_back(now: dict[str, Value], name: str, before: Mapping[str, Value]) -> None:
    if name in before:
        now[name] = before[name]
    else:
        now.pop(name, None)
