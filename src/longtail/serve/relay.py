"""What an upstream's answer says, and how a streamed one is passed on.

A stream goes on event by event, byte for byte: the beginning of an event waits here for its end, without which no
client can use it. So when a stream breaks, the event that was broken off is left out, and the error event that ends the
stream stands on its own; half a JSON before it would fail in the client first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from longtail.serve.calls import Outcome
from longtail.serve.sse import LONGEST_EVENT_BYTES, StreamWatch
from longtail.serve.upstream import Exchange, Failed, cut_short, garbage


class Relay:
    """The chunks of a streamed answer. Cancelling a read closes the upstream's connection, as ``aclose`` does.

    ``known``: the events are those of completions, so that it can be told whether they are complete.
    ``note(kind, why)`` is called for a failure.
    """

    def __init__(self, exchange: Exchange, outcome: Outcome, *, known: bool, note: Callable[[str, str], None]) -> None:
        self._exchange, self._outcome, self._note = exchange, outcome, note
        self._known = known
        self._watch = StreamWatch()
        self._held = bytearray()  # the beginning of an event
        self._torn = False  # more of an event than is held has gone out
        self._over = False

    def __aiter__(self) -> Relay:
        return self

    async def __anext__(self) -> bytes:
        while not self._over:
            try:
                chunk = await self._exchange.read()
            except Failed as failed:
                out = self._break(failed)
            except BaseException:
                await self.aclose()
                raise
            else:
                out = self._pass_on(chunk) if chunk else self._end()
            if out:
                return out
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._over = True
        self._exchange.close()

    def _pass_on(self, chunk: bytes) -> bytes:
        """Whole events: what has come of the next one waits for its end, unless it grows out of bounds."""
        watch, outcome = self._watch, self._outcome
        events = watch.feed(chunk)
        outcome.streamed_tokens = watch.tokens
        if outcome.first_token_s is None and watch.content_events:
            outcome.first_token_s = time.monotonic()
        if events:
            self._torn = False
        if events == len(chunk) and not self._held:
            return chunk
        whole = len(self._held) + events if events else 0
        self._held += chunk
        if len(self._held) - whole > LONGEST_EVENT_BYTES or self._torn:
            self._torn = True
            whole = len(self._held)
        out = bytes(self._held[:whole])
        del self._held[:whole]
        return out

    def _end(self) -> bytes:
        """The upstream has ended the stream in good order."""
        self._watch.end()
        if self._known and not self._watch.complete:
            return self._break(cut_short())
        self._finish()
        return bytes(self._held)

    def _break(self, failed: Failed) -> bytes:
        if self._over:
            return b""
        if self._watch.done or self._watch.errors:  # nothing is missing, or the client has been told
            self._finish()
            return b""
        self._outcome.failure = failed.kind
        self._over = True
        self._note(failed.kind, f"{failed}, in mid-stream")
        self._exchange.close()
        return (b"\n\n" if self._torn else b"") + failed.error.event()

    def _finish(self) -> None:
        self._over = True
        self._exchange.close()
        self._outcome.output_tokens = self._watch.completion_tokens
        self._outcome.finish = self._watch.finish_reason
        if self._watch.errors:
            self._outcome.failure = "engine"
            self._note("engine", "engine: it sent an error event")


def read_answer(body: bytes, outcome: Outcome, *, measured: bool) -> None:
    """Takes from the JSON of a whole answer what the outcome should say. ``measured``: its end was announced or marked,
    so that a connection which broke early would have been noticed.

    Raises:
        Failed: It is not JSON.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise garbage("something that is not the JSON of a completion") if measured else cut_short()
    watch = StreamWatch()
    watch.see(answer)
    outcome.output_tokens, outcome.streamed_tokens = watch.completion_tokens, watch.completion_tokens or 0
    outcome.finish = watch.finish_reason
    if watch.errors:
        outcome.failure = "engine"
