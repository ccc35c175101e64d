"""How Numba kernels are compiled: once per machine, without the GIL, with IEEE division."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator

import numba

_NAME = os.path.join(tempfile.gettempdir(), f"longtail-kernels-{os.getuid()}")


def _probe() -> None:
    """Compiled never; Numba looks for a cache folder when it is decorated."""


def _ensure_cache_folder() -> None:
    """Numba caches beside the source or in the user's cache folder, and raises where neither can be written."""
    try:
        numba.njit(cache=True)(_probe)
    except RuntimeError:
        numba.config.CACHE_DIR = _NAME


_ensure_cache_folder()

jit = numba.njit(cache=True, nogil=True, error_model="numpy")
"""Decorator of every function that runs inside a kernel."""

callback = numba.cfunc(numba.types.void(numba.types.voidptr), cache=True)
"""Decorator of a kernel's entry: a C function over an argument block (see ``team.py``)."""


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Hold this user's compile lock.

    Numba's cache is not made for processes that compile the same function for different types at once: each may write
    the file that the other's index entry names. And workers that start together should compile once, not each.
    """
    with open(f"{_NAME}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
