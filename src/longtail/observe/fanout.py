"""Several sinks as one: a sink that fails is dropped with one warning; the others, and the run, go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from longtail.core.events import Event, Sink
from longtail.observe.store import warn_on_stderr


class FanOut:
    """Writes every event to every sink that still works, in the given order."""

    def __init__(self, sinks: Iterable[Sink], *, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self._sinks = list(sinks)
        self._warn = warn
        self._failed: list[str] = []

    def write(self, event: Event) -> None:
        for sink in tuple(self._sinks):
            self._guard(sink, partial(sink.write, event))

    def close(self) -> None:
        """Close every sink, then say which ones are incomplete."""
        for sink in tuple(self._sinks):
            self._guard(sink, sink.close)
        self._sinks = []
        if self._failed:
            self._warn(f"incomplete because of an earlier error: {', '.join(self._failed)}.")
            self._failed = []

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            name = type(sink).__name__
            self._sinks.remove(sink)
            self._failed.append(name)
            self._warn(
                f"{name} stopped working and is switched off, the run goes on ({type(error).__name__}: {error})."
            )
