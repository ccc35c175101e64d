"""Threads for Numba kernels: torch's own OpenMP team.

A second pool of threads beside torch's would fight it for the same cores (idle OpenMP threads spin), so kernels run
on the threads that torch's operations use. A kernel is a C callback ``void(int64* args)`` that every thread of the team
calls. Its first words start at 0: ``NEXT``, the next work item, and ``TICKET``, the next thread number, which threads
take with ``fetch_add``, and ``FINISHED``, the items that are done. So a kernel needs to know neither the size of the
team nor who belongs to it, and which thread does an item never changes its result.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import struct

import torch

NEXT, TICKET, FINISHED = range(3)


class Kernel:
    """A compiled ``numba.cfunc`` over a block of 64-bit words."""

    def __init__(self, compiled) -> None:
        self._compiled = compiled
        self._address = compiled.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def run(self, args: ctypes.Array, threads: int) -> None:
        """Run on ``threads`` threads until all have returned; releases the GIL. ``args`` starts with zeros."""
        if threads > 1:
            _parallel()(self._address, args, threads, 0)
        else:
            self._call(args)


def words(count: int) -> type[ctypes.Array]:
    """The type of an argument block; call it with the values."""
    return ctypes.c_int64 * count


@functools.lru_cache(256)
def float_word(value: float) -> int:
    """The bits of a float64, to be an int64 word of an argument block."""
    return struct.unpack("q", struct.pack("d", value))[0]


def team_size() -> int:
    """Most threads of a kernel: torch's setting, or 1 where its OpenMP library is not GNU's."""
    return torch.get_num_threads() if _parallel() is not None else 1


@functools.cache
def _parallel():
    """``GOMP_parallel`` of the OpenMP library that torch loaded, or None."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for path in sorted(glob.glob(os.path.join(folder, "libgomp*"))):
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None
