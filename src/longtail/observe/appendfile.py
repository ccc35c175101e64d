"""An append-only file whose records are whole: a record that does not fit on the disk leaves no trace."""

from __future__ import annotations

import os
from pathlib import Path


class AppendFile:
    """Appends records with unbuffered writes, so that ``kill -9`` after :meth:`append` loses nothing.

    ``size`` is the file's length in bytes up to the last whole record. One writer per file.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._fd).st_size
        self._torn = False

    def append(self, record: bytes) -> None:
        """Write all of ``record``; on ``OSError`` (disk full, quota) the file is as before, and the error is raised."""
        self._drop_torn_end()
        self._torn = True
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            self._drop_torn_end()
            raise
        self.size += len(record)
        self._torn = False

    def close(self) -> None:
        """Flush to the device and close; safe to call twice."""
        if self._fd < 0:
            return
        try:
            os.fsync(self._fd)
        except OSError:
            pass  # not every filesystem can; the data is with the operating system already
        finally:
            os.close(self._fd)
            self._fd = -1

    def _drop_torn_end(self) -> None:
        if self._torn:
            os.ftruncate(self._fd, self.size)
            self._torn = False
