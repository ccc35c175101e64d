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
_OFFSET = 0.5 + Z_MAX * _PER_UNIT
_CHUNK = 1024
"""Rows at a time where a row has many values: larger temporaries cost more in page faults than in arithmetic."""


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
        """Whole tokens (float32) at scores of any shape: the inverse of :meth:`beyond`; at most max_tokens."""
        index = z * np.float32(_PER_UNIT)
        index += np.float32(_OFFSET)
        return self._length_by_z.take(index.astype(np.intp), mode="clip")

    def expected_length(self, mean: np.ndarray, sd: np.ndarray, cut: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """E[min(length, limit)] float32 [n] where z ~ N(mean, sd^2) is truncated to z > mean + cut * sd."""
        scale, offset = sd * np.float32(_PER_UNIT), mean * np.float32(_PER_UNIT) + np.float32(_OFFSET)
        capped = bool((limits < self.curve.grid.max_tokens).any())
        out = np.empty(len(mean), np.float32)
        for start in range(0, len(mean), _CHUNK):
            rows = slice(start, start + _CHUNK)
            nodes, weights = normal.truncated_nodes(cut[rows])
            nodes *= scale[rows, None]
            nodes += offset[rows, None]
            lengths = self._length_by_z.take(nodes.astype(np.intp), mode="clip")
            if capped:
                np.minimum(lengths, limits[rows, None], out=lengths)
            out[rows] = lengths @ weights
        return out

    @cached_property
    def _length_by_z(self) -> np.ndarray:
        z = np.arange(-Z_MAX, Z_MAX + 1 / _PER_UNIT, 1 / _PER_UNIT)
        # A score that sits on a length must not round up to the next one.
        return np.ceil(np.interp(z, self._z_J, self.curve.grid.edges) - 1e-3).astype(np.float32)
