"""The standard normal distribution by table, in float32: a few nanoseconds a value, for thousands of rows a step.

Every function takes an array of any shape and returns float32. Survival, density and Mills ratio are read at the
nearest of points 1/1024 apart, so a tail probability at x is right to a relative x/2048 or so. Arguments outside
[-9, 16] take the end value, 1e-19 or less: a model that cannot bear that needs heavier tails, not a longer table.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

_PER_UNIT = 1024
_LOW, _HIGH = -9.0, 16.0
_GRID = np.arange(_LOW, _HIGH, 1 / _PER_UNIT)
_EXACT_SURVIVAL = np.array([0.5 * math.erfc(x / math.sqrt(2)) for x in _GRID.tolist()])
_EXACT_DENSITY = np.exp(-0.5 * _GRID**2) / math.sqrt(2 * math.pi)
_SURVIVAL = _EXACT_SURVIVAL.astype(np.float32)
_DENSITY = _EXACT_DENSITY.astype(np.float32)
_MILLS = (_EXACT_DENSITY / _EXACT_SURVIVAL).astype(np.float32)


def _nearest(table: np.ndarray, x: np.ndarray) -> np.ndarray:
    index = x * np.float32(_PER_UNIT)
    index += np.float32(0.5 - _LOW * _PER_UNIT)
    return table.take(index.astype(np.intp), mode="clip")


def survival(x: np.ndarray) -> np.ndarray:
    """P(Z > x)."""
    return _nearest(_SURVIVAL, x)


def density(x: np.ndarray) -> np.ndarray:
    return _nearest(_DENSITY, x)


def inverse_mills(x: np.ndarray) -> np.ndarray:
    """E[Z | Z > x] = density(x) / survival(x)."""
    return _nearest(_MILLS, x)


def quantile(p: np.ndarray) -> np.ndarray:
    """The x with P(Z <= x) = p, for p in (0, 1); Wichura's PPND7 (AS 241, 1988), relative error 1e-6 or so."""
    return _quantile(np.asarray(p)).astype(np.float32)


def _quantile(p: np.ndarray) -> np.ndarray:
    q = p - 0.5
    r = 0.180625 - q * q
    central = q * (((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179)
    central /= ((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1.0
    outer = np.abs(q) > 0.425
    if not outer.any():
        return central
    p_outer = p[outer]
    r = np.sqrt(-np.log(np.minimum(p_outer, 1.0 - p_outer)))
    near, far = r - 1.6, r - 5.0
    tail = (((1.7023821103e-1 * near + 1.3067284816) * near + 2.7568153900) * near + 1.4234372777) / (
        (1.2021132975e-1 * near + 7.3700164250e-1) * near + 1.0
    )
    very = (((1.7337203997e-2 * far + 4.2868294337e-1) * far + 3.0812263860) * far + 6.6579051150) / (
        (1.2258202635e-2 * far + 2.4197894225e-1) * far + 1.0
    )
    central[outer] = np.copysign(np.where(r <= 5.0, tail, very), q[outer])
    return central


_LOG_PER_UNIT = 512
_LOG_TAILS = np.arange(0.5 / _LOG_PER_UNIT, 28.0, 1 / _LOG_PER_UNIT)
_BY_LOG_TAIL = (-_quantile(np.exp(-_LOG_TAILS))).astype(np.float32)


def near_quantile(log_tail: np.ndarray) -> np.ndarray:
    """Roughly the x with log P(Z > x) = ``log_tail``: within 0.02 for tails of 0.95 and less. Where a search starts."""
    return _BY_LOG_TAIL.take((log_tail * np.float32(-_LOG_PER_UNIT)).astype(np.intp), mode="clip")


_CUT_PER_UNIT = 128
_CUT_LOW, _CUT_HIGH = -6.0, 9.0
_PARTS = (0.0, 0.6, 0.9, 0.99, 1.0)
_ORDER = 3


@cache
def _truncated_nodes() -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.legendre.leggauss(_ORDER)
    ends = np.array(_PARTS)
    half = np.diff(ends)[:, None] / 2
    p = (ends[:-1, None] + half * (x + 1)).ravel()
    weights = (half * w).ravel()
    cut = np.arange(_CUT_LOW, _CUT_HIGH, 1 / _CUT_PER_UNIT)
    tail = np.array([0.5 * math.erfc(c / math.sqrt(2)) for c in cut.tolist()])
    nodes = -_quantile(tail[:, None] * (1 - p))
    return nodes.astype(np.float32), weights.astype(np.float32)


def truncated_nodes(cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes x [N, Q] and weights [Q] (float32) with E[g(Z) | Z > cut] = sum of weights * g(x), for cut [N].

    Gauss-Legendre in the probability, in four parts that get finer towards 1, so that means of heavy-tailed g are
    right too. ``cut`` is read at the nearest 1/128.
    """
    nodes, weights = _truncated_nodes()
    index = cut * np.float32(_CUT_PER_UNIT)
    index += np.float32(0.5 - _CUT_LOW * _CUT_PER_UNIT)
    return nodes.take(index.astype(np.intp), axis=0, mode="clip"), weights
