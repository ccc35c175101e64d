"""How Numba kernels are compiled: once per machine and source, without the GIL, with IEEE division.

Compiled kernels are cached in ``NUMBA_CACHE_DIR``, or else ``$XDG_CACHE_HOME/longtail`` (``~/.cache/longtail``), or
else the folder for temporary files. Numba notices changes of the file that a function is in, but not of the files that
it takes functions from, so there is a folder for each version of all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numba

_SOURCES = ("attention", "jit", "lanes", "linear", "program", "sampling", "simd", "team")


@functools.cache
def _cache_folder() -> Path:
    source = hashlib.blake2b(digest_size=8)
    for name in _SOURCES:
        source.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    fallback = os.path.join(tempfile.gettempdir(), f"longtail-{os.getuid()}")
    for base in (numba.config.CACHE_DIR, os.path.join(home, "longtail"), fallback):
        if base:
            folder = Path(base) / f"kernels-{source.hexdigest()}"
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    return folder
    raise OSError(f"no folder for compiled kernels can be written (tried {home} and {fallback}): set NUMBA_CACHE_DIR")


@contextlib.contextmanager
def _our_cache() -> Iterator[None]:
    """Numba fixes a function's cache folder when it is decorated; other users of Numba keep theirs."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(_cache_folder())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def jit(function):
    """Decorator of every function that runs inside a kernel."""
    with _our_cache():
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def callback(function):
    """Decorator of a kernel's entry, a C function over an argument block (see ``team.py``); compiles it at once."""
    with _our_cache():
        return numba.cfunc(numba.types.void(numba.types.voidptr), cache=True)(function)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Hold the compile lock of this user and source.

    Numba's cache is not made for processes that compile the same function for different types at once: each may write
    the file that the other's index entry names. And workers that start together should compile once, not each.
    """
    with open(_cache_folder() / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
