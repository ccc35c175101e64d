"""The belief about the rest of each sequence, frozen: what the planner and the rollout order ask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longtail.core.errors import LongtailError
from longtail.lengths import normal
from longtail.lengths.scores import Scores

LEAST_P = 0.001
"""Quantiles are asked for between this and 1 - this: further out nothing is known."""

_ROOT_STEPS = 3
_SLACK = np.float32(0.03)


class BeliefError(LongtailError):
    """A call that the beliefs cannot take: names the argument and the first offending value."""


@dataclass(frozen=True, kw_only=True)
class Remaining:
    """Distributions of the tokens still to come of n sequences, in the order of ``ids``. Immutable; no clock, no state.

    A sequence's normal score z is N(``mean``, ``sd``^2) with weight 1 - ``outlier`` and N(0, 1) otherwise, truncated to
    z > ``score``, the score of what it has generated. All that lies beyond its limit is an atom at the limit.
    """

    ids: np.ndarray
    """int64 [n]: sequence ids; prompt keys where nothing has started yet."""
    generated: np.ndarray
    """int64 [n]."""
    limits: np.ndarray
    """int64 [n]: tokens at which each sequence is cut off."""
    score: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    """float32 [n] each."""
    outlier: float
    scores: Scores

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray) -> Remaining:
        """Those of ``rows`` only."""
        return Remaining(
            ids=self.ids[rows],
            generated=self.generated[rows],
            limits=self.limits[rows],
            score=self.score[rows],
            mean=self.mean[rows],
            sd=self.sd[rows],
            outlier=self.outlier,
            scores=self.scores,
        )

    def survival(self, tokens: np.ndarray) -> np.ndarray:
        """P(remaining > t), float32 [n, T], for integers ``tokens`` [T]."""
        horizons = np.asarray(tokens, np.int64).tolist()
        out = np.empty((len(self), len(horizons)), np.float32)
        for j, t in enumerate(horizons):
            out[:, j] = self.survives(t)
        return out

    def survives(self, tokens: int | np.ndarray) -> np.ndarray:
        """P(remaining > t), float32 [n], for one integer ``tokens``, or for one per sequence [n]."""
        length = self.generated + tokens
        z = self.scores.beyond(np.minimum(np.maximum(length, self.generated), self.limits))
        probability = self._tail(z) / self._alive
        probability[length >= self.limits] = 0.0
        probability[length < self.generated] = 1.0
        return np.minimum(probability, np.float32(1.0))

    def expected_alive(self, tokens: np.ndarray) -> np.ndarray:
        """How many of these sequences still run after ``tokens`` [T] more decode steps each, in expectation [T]."""
        horizons = np.asarray(tokens, np.int64).tolist()
        return np.array([self.survives(t).sum(dtype=np.float64) for t in horizons])

    def quantile(self, p: float) -> np.ndarray:
        """The smallest t (int64 [n]) with P(remaining <= t) >= ``p``; at least 1 while below the limit.

        Raises :class:`BeliefError` for p outside [0.001, 0.999].
        """
        return self.quantiles(np.array([p]))[0]

    def quantiles(self, levels: np.ndarray) -> np.ndarray:
        """Int64 [L, n]: :meth:`quantile` at each of ``levels`` [L], in a tenth of the time for few sequences."""
        for p in levels.tolist():
            if not LEAST_P <= p <= 1.0 - LEAST_P:
                known = f"quantiles of remaining lengths are known from {LEAST_P} to {1.0 - LEAST_P}"
                raise BeliefError(f"p is {p}; {known}")
        total = self.scores.length(self._root((1.0 - levels[:, None]).astype(np.float32) * self._alive))
        least = np.minimum(self.generated + 1, self.limits)
        return np.minimum(np.maximum(total.astype(np.int64), least), self.limits) - self.generated

    def interval(self, level: float) -> tuple[np.ndarray, np.ndarray]:
        """The central interval (low, high) that holds the remaining tokens with probability ``level``."""
        return self.quantile((1.0 - level) / 2), self.quantile((1.0 + level) / 2)

    def expected(self) -> np.ndarray:
        """Expected remaining tokens, float64 [n]: right to a per cent or so where lengths have no large atoms."""
        curve = self.scores.curve
        at_large = curve.grid.at(curve.area, self.generated) - curve.grid.at(curve.area, self.limits)
        at_large /= self._population_tail
        own = self.scores.expected_length(self.mean, self.sd, self._cut, self.limits) - self.generated
        stray = np.float32(self.outlier) * self._population_tail / self._alive
        own += stray * (at_large - own)
        left = self.limits - self.generated
        return np.minimum(np.maximum(own, np.minimum(left, 1)), left)

    @cached_property
    def _cut(self) -> np.ndarray:
        return (self.score - self.mean) / self.sd

    @cached_property
    def _population_tail(self) -> np.ndarray:
        return normal.survival(self.score)

    @cached_property
    def _alive(self) -> np.ndarray:
        """P(z > score): what every question is conditioned on."""
        return (1.0 - self.outlier) * normal.survival(self._cut) + self.outlier * self._population_tail

    def _tail(self, z: np.ndarray) -> np.ndarray:
        """P(own z > ``z``) [..., n], not conditioned on being alive."""
        own = normal.survival((z - self.mean) / self.sd)
        own *= np.float32(1.0 - self.outlier)
        own += np.float32(self.outlier) * normal.survival(z)
        return own

    def _root(self, tail: np.ndarray) -> np.ndarray:
        """The z [..., n] beyond which each sequence has probability ``tail`` [..., n].

        The root lies between the quantiles of the two components. False position (Illinois) on a fixed number of steps
        for all rows: the probability beyond the result is right to 0.01.
        """

        def excess(z: np.ndarray) -> np.ndarray:
            # tanh of half the log ratio: as straight as the logarithm near the root, without its cost.
            found = self._tail(z)
            return (found - tail) / (found + tail)

        x = normal.near_quantile(np.log(tail))
        own = self.mean + self.sd * x
        a = np.maximum(np.minimum(own, x) - _SLACK, self.score)
        b = np.maximum(np.maximum(own, x), a) + _SLACK
        fa, fb = excess(a), excess(b)
        for _ in range(_ROOT_STEPS):
            c = b - fb * (b - a) / (fb - fa)
            fc = excess(c)
            crossed = fc * fb < 0
            a = np.where(crossed, b, a)
            fa = np.where(crossed, fb, fa * np.float32(0.5))
            b, fb = c, fc
        return np.maximum(b - fb * (b - a) / (fb - fa), self.score)
