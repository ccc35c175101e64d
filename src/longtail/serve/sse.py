"""What a stream of server-sent events says, watched while its bytes pass by untouched.

The chunks may be split anywhere. Events end at a blank line; lines end with LF, CR or CRLF; several ``data:`` lines
make one event; comments (``: ...``) belong to none (https://html.spec.whatwg.org/multipage/server-sent-events.html).
Every event's JSON is parsed: for the 300 bytes of a token that costs a few microseconds, a small part of relaying it.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

LONGEST_EVENT_BYTES = 4 << 20
"""A longer event is not looked into, so that a line without an end cannot fill the memory."""
_CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


class StreamWatch:
    """Notes of one answer: feed it the chunks in turn, then :meth:`end`. How they were split changes no note.

    ``content_events`` counts for each choice the events that carried text, reasoning or pieces of tool calls: about its
    tokens so far. ``completion_tokens`` is the server's own count, of all choices, as last told. ``errors`` counts
    error events, ``done`` is whether ``[DONE]`` came, and ``mid_event`` whether the last byte was inside an event.
    """

    def __init__(self) -> None:
        self.content_events: dict[int, int] = {}
        self.completion_tokens: int | None = None
        self.finish: dict[int, str] = {}
        self.errors = 0
        self.done = False
        self._line = bytearray()  # what has come of a line without an end
        self._in_line = self._in_event = False
        self._data: list[bytes] = []  # the data lines of an event without an end
        self._event_bytes = 0  # in all lines of that event
        self._too_long = False  # it, or the line without an end, is past the limit
        self._after_cr = False

    @property
    def mid_event(self) -> bool:
        return self._in_line or self._in_event

    @property
    def tokens(self) -> int:
        """Of all choices: as the server counts them, else events with content."""
        return sum(self.content_events.values()) if self.completion_tokens is None else self.completion_tokens

    @property
    def finish_reason(self) -> str | None:
        """``length`` if any choice was cut off, else that of the first choice."""
        if not self.finish:
            return None
        return "length" if "length" in self.finish.values() else self.finish[min(self.finish)]

    @property
    def complete(self) -> bool:
        """Whether a stream may end here: some servers leave out ``[DONE]``, none both that and every finish reason."""
        return self.done or bool(self.finish) or self.errors > 0

    def feed(self, chunk: bytes) -> int:
        """How many of these bytes, from the first, reach up to a place between two events; 0 if there is none.

        The bytes after it belong to an event whose end is still to come.
        """
        at = between = 0
        if self._after_cr and chunk.startswith(b"\n"):
            at = 1
            between = 0 if self.mid_event else 1
        for line in (chunk[at:] if at else chunk).splitlines(keepends=True):
            at += len(line)
            if line[-1] not in b"\r\n":
                self._begin_line(line)
                break
            self._take_line(line.rstrip(b"\r\n"))
            if not self._in_event:
                between = at
        if chunk:
            self._after_cr = chunk.endswith(b"\r")
        return between

    def end(self) -> None:
        """The stream is over: what came last counts even without a blank line behind it."""
        if self._in_line:
            self._take_line(b"")
        self._end_event()

    def see(self, answer: Any) -> None:
        """Notes what one parsed event, or a whole answer, says."""
        if not isinstance(answer, dict):
            return
        if answer.get("error") is not None or answer.get("object") == "error":
            self.errors += 1
        for holder in (answer, answer.get("response")):  # the latter in events of /v1/responses
            usage = holder.get("usage") if isinstance(holder, dict) else None
            for name in ("completion_tokens", "output_tokens"):
                if isinstance(usage, dict) and type(tokens := usage.get(name)) is int:
                    self.completion_tokens = tokens
        choices = answer.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._see_choice(choice)

    def _see_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        if type(index) is not int:
            index = 0
        delta = choice.get("delta")
        if choice.get("text") or (isinstance(delta, dict) and any(delta.get(name) for name in _CONTENT)):
            self.content_events[index] = self.content_events.get(index, 0) + 1
        if isinstance(reason := choice.get("finish_reason"), str):
            self.finish[index] = reason

    def _begin_line(self, piece: bytes) -> None:
        self._in_line = True
        if len(self._line) + self._event_bytes > LONGEST_EVENT_BYTES:
            self._too_long = True
        else:
            self._line += piece

    def _take_line(self, line: bytes) -> None:
        """A line is whole: ``line`` are its bytes, or its last ones if it had begun."""
        if self._in_line:
            line = bytes(self._line[:1]) if self._too_long else bytes(self._line) + line
            self._line, self._in_line = bytearray(), False
        if not line:
            self._end_event()
        elif line.startswith(b":") and not self._in_event:
            self._too_long = False
        else:
            self._in_event = True
            self._event_bytes += len(line)
            self._too_long = self._too_long or self._event_bytes > LONGEST_EVENT_BYTES
            if line.startswith(b"data:") and not self._too_long:
                self._data.append(line[6:] if line.startswith(b" ", 5) else line[5:])

    def _end_event(self) -> None:
        data = b"" if self._too_long else b"\n".join(self._data)
        self._data, self._event_bytes, self._in_event, self._too_long = [], 0, False, False
        if data.strip() == b"[DONE]":
            self.done = True
        elif data:
            with contextlib.suppress(ValueError, RecursionError):  # not JSON: it passes by, and says nothing
                self.see(json.loads(data))
