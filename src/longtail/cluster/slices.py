"""Long work in slices, between which other work has its turn.

The work runs in a thread of its own, but never at the same time as the thread that asks for slices: one of the two
waits for the other. So it is a coroutine that may be left from deep within a library, with all of that library's
thread-local state (of autograd, for one) left as it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Cancelled(Exception):
    """The rest of the work is not wanted; raised where it has paused."""


class Slices(Generic[T]):
    """``work`` is called with a function that it calls now and then, with the share of it that is done: there a slice
    may end. All methods are for one thread, the same as long as the work lasts."""

    result: T
    """What the work returned, once it is over."""

    def __init__(self, work: Callable[[Callable[[float], None]], T]) -> None:
        self._work = work
        self._resume, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0
        self._cancelled = False
        self._error: BaseException | None = None
        self._threads = torch.get_num_threads()
        self._thread: threading.Thread | None = None
        self.over = False
        self.share = 0.0
        """Of the work, as it said last."""

    def run(self, seconds: float) -> bool:
        """Go on for so long, or to the end. Returns whether it is over. Raises what the work raises."""
        self._until = time.perf_counter() + seconds
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="slices", daemon=True)
            thread.start()
            self._thread = thread
        else:
            self._resume.release()
        self._paused.acquire()
        if self.over:
            self._thread.join()
        # An error holds the frames of the work and all that is in them, so nothing may hold the error for longer.
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self.over

    def cancel(self) -> None:
        """End the work where it has paused; nothing happens if it is over, or was never begun."""
        if self._thread is not None and not self.over:
            self._cancelled = True
            self._resume.release()
            self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a per-thread setting
        try:
            self.result = self._work(self._pause)
        except Cancelled:
            pass
        except BaseException as error:
            self._error = error
        self.over = True
        self._paused.release()

    def _pause(self, share: float) -> None:
        self.share = share
        if time.perf_counter() < self._until:
            return
        self._paused.release()
        self._resume.acquire()
        if self._cancelled:
            raise Cancelled
