"""Keeps the lengths of served answers, one JSON object a line: what ``longtail rank train`` reads.

    {"prompt": "...", "output_tokens": 137, "finish_reason": "stop", "model": "m", "quantile": 0.41, "time": 1.7e9}
    {"features": {...}, "output_tokens": 137, ...}             without the prompt: what a ranker sees of it

Invariants: a row is a whole line; a new file can be read by its owner only; nothing that happens to the disk disturbs
serving. Rows are encoded and written by a thread, at most ``EVERY_S`` seconds after they came: a killed process loses
no more than those.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from longtail.core.errors import DataError
from longtail.observe.appendfile import AppendFile
from longtail.serve.calls import Call, Outcome

EVERY_S = 1.0
MOST_ROWS = 10_000
"""So many rows may wait for a slow disk; those beyond it fail."""
CLOSE_WITHIN_S = 10.0
_BLOCK = 1 << 16
_HIDDEN = "prompt that is not written"


class Recorder:
    """Appends to ``path`` from construction to :meth:`close`. ``written`` and ``failed`` count rows.

    Without ``keep_prompts`` rows hold features in place of prompts; a file may have both kinds. Raises
    :class:`DataError` if the file cannot be opened, or holds something else. One writer per file.
    """

    def __init__(self, path: str | Path, *, keep_prompts: bool) -> None:
        self.path, self.keep_prompts = Path(path), keep_prompts
        self.written = self.failed = 0
        self._rows: deque[dict[str, Any]] = deque()
        self._closing = threading.Event()
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if self.path.is_file():
                _prepare(self.path)
            self._file = AppendFile(self.path)
        except OSError as error:
            raise DataError(
                f"{self.path}: lengths cannot be recorded there ({error.strerror}): choose another file"
            ) from error
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def write(self, call: Call, outcome: Outcome, *, prompt_allowed: bool = True) -> None:
        """Record a call that was answered; returns at once and never raises. The prompt is kept if ``keep_prompts``
        and ``prompt_allowed`` say so.

        Left out are calls whose answer failed or has an unknown number of tokens, and those without exactly one
        prompt: which prompt the tokens belong to is not known. Of several samples the mean length is recorded.
        """
        if outcome.output_tokens is None or outcome.failure is not None or len(call.prompts) != 1:
            return
        if len(self._rows) >= MOST_ROWS or self._closing.is_set():
            self.failed += 1
            return
        model = call.fields.get("model")
        self._rows.append(
            {
                "prompt" if self.keep_prompts and prompt_allowed else _HIDDEN: call.prompts[0],
                "output_tokens": round(outcome.output_tokens / call.samples),
                "finish_reason": outcome.finish,
                "model": model if isinstance(model, str) else None,
                "quantile": None if call.quantile is None else round(call.quantile, 4),
                "time": round(time.time(), 3),
            }
        )

    def close(self) -> None:
        """Write what is left, but wait no longer than ten seconds for the disk; safe to call twice."""
        self._closing.set()
        self._thread.join(CLOSE_WITHIN_S)

    # What follows runs on the thread.

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._flush()
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        lines = []
        for _ in range(len(self._rows)):
            try:
                lines.append(self._line(self._rows.popleft()))
            except Exception:
                self.failed += 1
            time.sleep(0)  # let the event loop go on between rows
        try:
            if lines:
                self._file.append(b"".join(lines))
                self.written += len(lines)
        except OSError:
            self.failed += len(lines)

    def _line(self, row: dict[str, Any]) -> bytes:
        if _HIDDEN in row:
            from longtail.lengths.feature_rows import encode

            row = {"features": encode(row.pop(_HIDDEN)), **row}
        return json.dumps(row, allow_nan=False).encode("ascii") + b"\n"


def _prepare(path: Path) -> None:
    """Make a file that is there end with a whole line. Raises :class:`DataError` if it is no file of rows."""
    with path.open("r+b") as file:
        first = file.readline()
        row = _object(first)
        tail = _after_last_line_end(file)
        is_whole = row is not None or first.endswith(b"\n")
        if is_whole and not {"prompt", "features"} & set(row or ()):
            raise DataError(f"{path} holds something else than recorded lengths: choose another file")
        if not tail:
            return
        if _object(tail) is not None:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        elif tail.startswith((b"{", b"\0")):  # torn when an earlier process was killed, or the power failed
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        else:
            raise DataError(f"{path} ends with something else than a recorded length: choose another file")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _after_last_line_end(file: BinaryIO) -> bytes:
    at = file.seek(0, os.SEEK_END)
    tail = b""
    while at > 0 and b"\n" not in tail:
        start = max(0, at - _BLOCK)
        file.seek(start)
        tail = file.read(at - start) + tail
        at = start
    return tail[tail.rfind(b"\n") + 1 :]
