"""Normal scores of lengths: z = Phi^-1(P(length <= t)), the scale on which the belief model is linear and Gaussian."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from longtail.lengths import normal
from longtail.lengths.survival import Curve

Z_MAX = 6.0
"""Scores are held within +- this: probabilities below 1e-9 are no knowledge."""

_LEAST = 1e-9
_PER_UNIT = 512


class Scores:
    """The map between lengths and normal scores that a curve defines. Immutable."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self._z_J = -normal.quantile(np.clip(curve.survival_J, _LEAST, 1.0 - _LEAST))

    def beyond(self, lengths: np.ndarray) -> np.ndarray:
        """The score z with P(Z > z) = P(length > t), for integers t in [0, max_tokens]; float32."""
        return self.curve.grid.at(self._z_J, lengths)

    def middle(self, lengths: np.ndarray) -> np.ndarray:
        """The score of a response that ended at t: that of the middle of its probability (mid-rank, as ties have)."""
        below = np.where(lengths > 0, self.beyond(np.maximum(lengths - 1, 0)), np.float32(-Z_MAX))
        here = self.beyond(lengths)
        middle = (below + here) / 2
        # Where the two are not close, the score of the mean is not the mean of the scores.
        wide = np.flatnonzero(here - below > 0.05)
        if len(wide):
            middle[wide] = -normal.quantile((normal.survival(below[wide]) + normal.survival(here[wide])) / 2)
        return middle

    def length(self, z: np.ndarray) -> np.ndarray:
        """Tokens (float32, not rounded) at scores of any shape: the inverse of :meth:`beyond`; at most max_tokens."""
        index = z * np.float32(_PER_UNIT)
        index += np.float32(0.5 + Z_MAX * _PER_UNIT)
        return self._length_by_z.take(index.astype(np.intp), mode="clip")

    @cached_property
    def _length_by_z(self) -> np.ndarray:
        z = np.arange(-Z_MAX, Z_MAX + 1 / _PER_UNIT, 1 / _PER_UNIT)
        return np.interp(z, self._z_J, self.curve.grid.edges).astype(np.float32)
