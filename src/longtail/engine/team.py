"""Threads for Numba kernels: torch's own OpenMP team.

A second pool of threads beside torch's would fight it for the same cores (idle OpenMP threads spin), so kernels run
on the threads that just did the matrix product. A kernel is a C callback ``void(int64* args)``; its first two words are
``args[0]``, the next work item, and ``args[1]``, the next thread ticket, which every thread takes with ``fetch_add``.
Which thread does an item never changes its result.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os

import numpy as np
import torch


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


def team_size() -> int:
    """Most threads that :func:`run` may use: torch's setting, or 1 where its OpenMP library is not GNU's."""
    return torch.get_num_threads() if _parallel() is not None else 1


def run(kernel, args: np.ndarray, threads: int) -> None:
    """Run a compiled ``numba.cfunc`` on ``threads`` threads until all have returned; releases the GIL."""
    args[0] = args[1] = 0
    if threads > 1:
        _parallel()(kernel.address, args.ctypes.data, threads, 0)
    else:
        kernel.ctypes(args.ctypes.data)
