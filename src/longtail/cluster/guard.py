"""Ends the processes that a dead driver leaves behind.

Ray's helper processes can outlive a driver that was killed with ``kill -9``. A guard is a small process in a session
of its own that is told which processes belong to the driver; when its standard input closes, because the driver has
ended in whatever way, it gives them a moment to end by themselves and kills the rest.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import psutil

GRACE_S = 2.0


class Guard:
    """The driver's side: :meth:`watch` again after starting processes, :meth:`close` when they have been ended."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "longtail.cluster.guard"], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def watch(self) -> None:
        """Everything that this process has started by now is to end with it."""
        assert self._process.stdin is not None
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid != self._process.pid:
                    self._process.stdin.write(f"{child.pid} {child.create_time()!r}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Let the guard do its work; returns at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def main() -> None:
    known = [(int(pid), float(start)) for pid, start in (line.split() for line in sys.stdin)]
    deadline = time.monotonic() + GRACE_S
    while alive := [p for pid, start in known if (p := _same_process(pid, start)) is not None]:
        if time.monotonic() > deadline:
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return
        time.sleep(0.05)


def _same_process(pid: int, start: float) -> psutil.Process | None:
    """The process, unless it has ended or its id belongs to another one by now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.create_time() == start and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


if __name__ == "__main__":
    main()
