"""The event log of a run: ``events.jsonl``, one strict JSON object per line, appended to by every start of the run.

Invariants: every line but the last is a whole record, whatever killed the writer and however often; opening the
store repairs the last one. A record that has been written stays written (``kill -9`` loses nothing; each event
goes to the operating system at once, about 2 microseconds).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from longtail.core.errors import ConfigError, DataError
from longtail.core.events import EVENTS, Event, Note, Progress, from_record, to_record
from longtail.observe.appendfile import AppendFile

EVENTS_FILE = "events.jsonl"


def warn_on_stderr(message: str) -> None:
    """How a sink complains unless told otherwise; a lost terminal is no reason to stop either."""
    with contextlib.suppress(OSError):
        print(f"warning: {message}", file=sys.stderr, flush=True)


class RunStore:
    """The sink that writes ``folder/events.jsonl``. :class:`Progress` is not stored.

    When the disk is full the store warns once, keeps up to ``MAX_PENDING_BYTES`` of events in memory and tries again
    every ``RETRY_S`` seconds; what it then still could not write is counted, noted in the log where the gap is,
    and reported by :meth:`close`. Raises :class:`ConfigError` if the file cannot be opened.
    """

    MAX_PENDING_BYTES = 8 << 20
    RETRY_S = 1.0

    def __init__(self, folder: Path, *, warn: Callable[[str], None] = warn_on_stderr) -> None:
        self.path = Path(folder) / EVENTS_FILE
        self.lost = 0
        self._warn = warn
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._gap = 0
        self._error: OSError | None = None
        self._retry_at = 0.0
        self._closed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            repair(self.path)
            self._file = AppendFile(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}): choose another runs_dir or free it."
            ) from error

    def write(self, event: Event) -> None:
        """Append the event; never raises because of the disk or of what is in the event."""
        if self._closed or isinstance(event, Progress):
            return
        try:
            line = encode(event)
        except (TypeError, ValueError) as error:
            self._warn(f"{self.path}: a {event.kind!r} event is not plain data and was not logged ({error}).")
            self.lost += 1
            return
        self._queue(line)
        if self._error is None or time.monotonic() >= self._retry_at:
            self._flush()

    def close(self) -> None:
        """Write what is left; warns if the log is incomplete. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._flush()
        self.lost += len(self._pending)
        self._file.close()
        if self.lost:
            reason = f" ({self._error.strerror})" if self._error else ""
            self._warn(f"{self.path} is incomplete: {self.lost} events could not be written{reason}.")

    def _queue(self, line: bytes) -> None:
        if self._pending_bytes + len(line) > self.MAX_PENDING_BYTES:
            self.lost += len(self._pending)
            self._gap += len(self._pending)
            self._pending, self._pending_bytes = [], 0
        self._pending.append(line)
        self._pending_bytes += len(line)

    def _flush(self) -> None:
        lines = self._pending
        if self._gap:
            message = f"{self._gap} events are missing here: they could not be written ({self._error})."
            lines = [encode(Note(level="warning", message=message)), *lines]
        try:
            self._file.append(b"".join(lines))
        except OSError as error:
            if self._error is None:
                self._warn(
                    f"{self.path} cannot be written ({error.strerror}). The run goes on; "
                    f"free some space, or its log stays incomplete."
                )
            self._error = error
            self._retry_at = time.monotonic() + self.RETRY_S
            return
        self._pending, self._pending_bytes, self._gap, self._error = [], 0, 0, None


def encode(event: Event) -> bytes:
    """One line of strict JSON (ASCII, no NaN). Raises ``TypeError`` or ``ValueError`` for what is not plain data."""
    return json.dumps(to_record(event), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def read_events(folder_or_file: str | Path) -> Iterator[Event]:
    """The events of a run in order, without a torn last line and without kinds that this version does not know.

    Safe to call while the run writes. Raises :class:`DataError` naming the line where the log is damaged, or when
    there is no log.
    """
    path = Path(folder_or_file)
    if path.is_dir():
        path /= EVENTS_FILE
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): is this the folder of a run?") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                event = _decode(line)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if not line.endswith(b"\n"):
                    return
                raise DataError(
                    f"{path}:{number}: this line is not an event ({error}): the log is damaged there; "
                    f"delete the line to read the rest."
                ) from error
            if event is not None:
                yield event


def repair(path: Path) -> int:
    """Make the log end with a whole line; returns the bytes cut off (0 for a sound or absent file).

    A whole last record that lacks only its line break is kept. Anything else after the last line break (a torn
    record, the zeros that a power failure can leave) goes.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        tail = _after_last_newline(file)
        if not tail:
            return 0
        try:
            _decode(tail)
        except (ValueError, TypeError, KeyError, AttributeError):
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
            return len(tail)
        file.seek(0, os.SEEK_END)
        file.write(b"\n")
        return 0


def _after_last_newline(file: Any, block: int = 1 << 16) -> bytes:
    position = file.seek(0, os.SEEK_END)
    tail = b""
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        tail = file.read(position - start) + tail
        newline = tail.rfind(b"\n")
        if newline >= 0:
            return tail[newline + 1 :]
        position = start
    return tail


def _decode(line: bytes) -> Event | None:
    """The event of a line, None for an unknown kind; any error means that the line is damaged."""
    record = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise ValueError("no JSON object with a 'kind'")
    return from_record(record) if record["kind"] in EVENTS else None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")
