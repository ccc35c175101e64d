"""Kendall's tau without SciPy: importing ``scipy.stats`` stops a process that others wait for most of a second."""

from __future__ import annotations

import math

import numpy as np


def tau_b(x: np.ndarray, y: np.ndarray) -> float | None:
    """Kendall's tau-b of two rows [n], n >= 1 (Biometrika 33, 1945); None where all of ``x`` or of ``y`` are equal.

    O(n^2) in time and memory: some milliseconds for 500, 10 ms and 16 MB for 1,000.
    """
    if (x == x[0]).all() or (y == y[0]).all():
        return None
    of_x, of_y = (np.sign(np.subtract.outer(v, v)).astype(np.float32).ravel() for v in (x, y))
    return float(of_x @ of_y) / math.sqrt(float(of_x @ of_x) * float(of_y @ of_y))
