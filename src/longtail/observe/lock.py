"""One live run per folder: the kernel holds the lock, so a run killed by ``kill -9`` leaves none behind."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from longtail.core.errors import ConfigError

LOCK_FILE = "run.lock"

_held: set[int] = set()


class RunLock:
    """A held lock; a context manager. The file stays after :meth:`release`: removing it would let two runs in."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Let the next run in; safe to call twice."""
        if self._fd in _held:
            _held.discard(self._fd)
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def lock_run(folder: Path) -> RunLock:
    """Take the folder (made if absent) for this process, or raise :class:`ConfigError` that names who has it.

    Forked children do not share the lock: it ends with this process even where they live on.
    """
    path = Path(folder) / LOCK_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened ({error.strerror}): choose another runs_dir.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = _describe_holder(fd)
        os.close(fd)
        raise ConfigError(
            f"{path.parent} is in use by {holder}: wait for that run, stop it, or give this one another name."
        ) from error
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"{path.parent} is on a filesystem without file locks ({error.strerror}): set runs_dir to another one."
        ) from error
    _held.add(fd)
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "start": time.time()}).encode(), 0)
    return RunLock(fd)


def _describe_holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["start"]))
        return f"process {holder['pid']} on {holder['host']} (started {since})"
    except (ValueError, KeyError, TypeError):
        return "another process that is just starting or stopping"


def _drop_in_child() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


# A forked child would share the open file, and with it the lock, beyond the death of the run.
os.register_at_fork(after_in_child=_drop_in_child)
