"""How Numba kernels are compiled: once per machine and source, without the GIL, with IEEE division.

Compiled kernels are cached in ``NUMBA_CACHE_DIR``, or else in Longtail's own cache (``models.cache_dir``). Numba
notices changes of the file that a function is in, but not of the files that it takes functions from, so there is a
folder for each version of all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numba

from longtail.engine.models import cache_dir

SOURCES = ("attention", "jit", "lanes", "linear", "program", "sampling", "sharded_sampling", "shm", "simd", "team")


@functools.cache
def _cache_folder() -> Path:
    source = hashlib.blake2b(digest_size=8)
    for name in SOURCES:
        source.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    folder = Path(numba.config.CACHE_DIR or cache_dir()) / f"kernels-{source.hexdigest()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiled_before(name: str) -> bool:
    """Whether :func:`note_compiled` was called with ``name`` on this machine, for these sources."""
    return (_cache_folder() / f"{name}.done").exists()


def note_compiled(name: str) -> None:
    (_cache_folder() / f"{name}.done").touch()


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
