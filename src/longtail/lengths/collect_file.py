"""The file of a collection: one JSON record a line, appended; what it holds is not asked for again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from longtail.core.errors import DataError
from longtail.lengths.data_prompts import Prompt


def record_key(prompt: Prompt, *, model: str, chat: bool, max_tokens: int | None, temperature: float | None) -> str:
    """What an answer depends on, as 16 hexadecimal digits."""
    what = [prompt, model, chat, max_tokens, temperature]
    return hashlib.blake2b(json.dumps(what).encode("ascii"), digest_size=8).hexdigest()


def read_done(path: Path) -> set[tuple[str, int]]:
    """The ``(key, sample)`` that a file of an earlier collection holds; a torn last line is none.

    Raises :class:`DataError` for a file that something else has written: it must not be appended to.
    """
    done = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                    done.add((str(record["key"]), int(record["sample"])))
                except (ValueError, KeyError, TypeError):
                    if not line.endswith(b"\n"):
                        break
                    raise DataError(
                        f"{path}:{number}: this line was not written by from-server: choose another --out"
                    ) from None
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return done


class Appender:
    """Appends whole records; a torn last line of an earlier process is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._mend()
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from error

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def append(self, record: dict[str, Any]) -> None:
        size = os.fstat(self._fd).st_size
        rest = memoryview(json.dumps(record).encode("ascii") + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise DataError(
                f"{self.path} cannot be written ({error.strerror}): what it holds is whole; free some space and run "
                "the same command again"
            ) from error

    def _mend(self) -> None:
        size = os.fstat(self._fd).st_size
        data = os.pread(self._fd, size, 0) if size else b""
        tail = data[data.rfind(b"\n") + 1 :]
        if not tail:
            return
        try:
            json.loads(tail)
            os.write(self._fd, b"\n")  # a whole record that only lacks its line break
        except ValueError:
            os.ftruncate(self._fd, size - len(tail))
