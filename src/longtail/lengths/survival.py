"""How long are responses? The survival function of lengths that are partly right-censored.

Lengths are counted per bin of a :class:`LengthGrid` (every integer up to 512, then bins 1/512 wide in log length), so
memory and time do not grow with the number of responses. The estimate is the product limit of Kaplan and Meier (1958)
with the posterior-mean hazards of a beta-process prior of constant concentration (Hjort, Annals of Statistics 18,
1990): with d_j responses that ended in bin j, and Y_j that got there at all,

    hazard_j = (d_j + c * h_j) / (Y_j + c)        P(length > edge_j) = prod over i <= j of (1 - hazard_i)

h_j is the prior's hazard (:func:`scale_free_hazard`), and c its weight: c sequences of unknown length at every age.
With c = 1, k lengths seen beyond an age leave 1 / (k + 1) for a longer one, which is what exchangeability says; it also
makes every question well-defined before the first response has ended.

Invariant: at every length where a response ended the curve is the product limit above; between two such lengths it
falls evenly (see :func:`spread`), because a length never seen is not an impossible one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

EXACT = 512
"""Lengths up to here have a bin of their own; longer ones a bin of at most 1/512 of their length."""


class LengthGrid:
    """Bins of lengths 0..``max_tokens``: bin j holds the lengths in (``edges[j-1]``, ``edges[j]``], bin 0 length 0.

    The edges below the cap are the same whatever the cap.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        growing = EXACT * np.exp(np.arange(1, 1 + int(EXACT * np.log(max(max_tokens, EXACT) / EXACT)) + 1) / EXACT)
        edges = np.concatenate([np.arange(EXACT + 1), growing.astype(np.int64)])
        self.edges: np.ndarray = np.concatenate([edges[edges < max_tokens], [max_tokens]])
        """int64 [J], increasing from 0 to ``max_tokens``."""
        lengths = np.arange(max_tokens + 1)
        self.bin_of: np.ndarray = np.searchsorted(self.edges, lengths)
        """int64 [max_tokens + 1]: the bin of each length."""
        below = self.edges[np.maximum(self.bin_of - 1, 0)]
        width = np.maximum(self.edges[self.bin_of] - below, 1)
        self.back: np.ndarray = ((self.edges[self.bin_of] - lengths) / width).astype(np.float32)
        """float32 [max_tokens + 1]: how far a length lies below its bin's edge, in bins: 0 for all exact ones."""

    def __len__(self) -> int:
        return len(self.edges)

    def at(self, values_J: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Values given at the edges, interpolated linearly at integer ``lengths`` in [0, max_tokens]."""
        j = self.bin_of.take(lengths)
        here = values_J.take(j)
        return here + self.back.take(lengths) * (values_J.take(j - 1, mode="clip") - here)


def scale_free_hazard(grid: LengthGrid) -> np.ndarray:
    """Hazard [J] of P(length > t) = (1 + t)^-a, which knows no scale but the cap: half of all responses pass its square
    root and a quarter run into it.
    """
    a = np.log(4.0) / np.log1p(grid.max_tokens)
    survival = np.exp(-a * np.log1p(grid.edges))
    return np.append(0.0, 1.0 - survival[1:] / survival[:-1])


def product_limit(ended_J: np.ndarray, censored_J: np.ndarray, hazard_J: np.ndarray, weight: float) -> np.ndarray:
    """P(length > edge) [J] from weights of responses that ended and that were cut off in each bin.

    A response cut off in bin j is taken to have outlived those that ended in it (the usual convention for ties).
    ``hazard_J`` and ``weight`` are the prior's; with weight 0 this is Kaplan and Meier's estimate, and the curve keeps
    its last value where nobody is at risk.
    """
    at_risk = (ended_J + censored_J)[::-1].cumsum()[::-1] + weight
    hazard = np.divide(ended_J + weight * hazard_J, at_risk, out=np.zeros(len(ended_J)), where=at_risk > 0)
    return np.cumprod(1.0 - np.minimum(hazard, 1.0))


def spread(survival_J: np.ndarray, ended_J: np.ndarray) -> np.ndarray:
    """The curve with the drop at each observed length spread evenly over the bins since the observed one before.

    Of ``ended_J[j]`` responses that ended in one bin only one is spread: what several share is a true atom. The curve
    is unchanged at every observed length.
    """
    observed = np.flatnonzero(ended_J)
    if len(observed) == 0:
        return survival_J
    drop = np.append(1.0, survival_J[:-1])[observed] - survival_J[observed]
    total = np.cumsum(drop / np.maximum(ended_J[observed], 1.0))
    bins = np.arange(len(survival_J))
    # Nothing is spread to length 0, which only an empty response has.
    known, dropped = (observed, total) if observed[0] == 0 else (np.append(0, observed), np.append(0.0, total))
    return survival_J - np.interp(bins, known, dropped) + dropped[np.searchsorted(known, bins, side="right") - 1]


@dataclass(frozen=True)
class Curve:
    """A survival function of lengths: ``survival_J[j]`` = P(length > ``grid.edges[j]``), non-increasing.

    ``survival_J[-1]`` is the probability of running into the cap ("the tail beyond the last event").
    """

    grid: LengthGrid
    survival_J: np.ndarray

    def survival(self, lengths: np.ndarray) -> np.ndarray:
        """P(length > t) for integers t of any shape; 1 below 0, and 0 from the cap on, where every response stops."""
        t = np.asarray(lengths, dtype=np.int64)
        inside = self.grid.at(self.survival_J, np.clip(t, 0, self.grid.max_tokens))
        return np.where(t < 0, 1.0, np.where(t >= self.grid.max_tokens, 0.0, inside))

    def quantile(self, p: np.ndarray) -> np.ndarray:
        """The smallest length t (int64) with P(length <= t) >= p; the cap where p lies beyond what ends before it."""
        p = np.asarray(p, dtype=np.float64)
        cdf = 1.0 - self.survival_J
        j = np.minimum(np.searchsorted(cdf, p), len(cdf) - 1)
        low, high = np.where(j > 0, cdf[j - 1], 0.0), cdf[j]
        part = np.divide(p - low, high - low, out=np.ones_like(p), where=high > low)
        edge, below = self.grid.edges[j], np.where(j > 0, self.grid.edges[j - 1], 0)
        return np.ceil(below + np.minimum(part, 1.0) * (edge - below) - 1e-9).astype(np.int64)

    @cached_property
    def area(self) -> np.ndarray:
        """Expected tokens generated beyond each edge: sum over t >= edge of P(length > t), up to the cap."""
        s, width = self.survival_J, np.diff(self.grid.edges)
        # Within a bin the curve is linear, and the sum is over integers: its first term is the upper value.
        per_bin = width * (s[:-1] + s[1:]) / 2 + (s[:-1] - s[1:]) / 2
        return np.append(per_bin[::-1].cumsum()[::-1], 0.0)


class LengthCounts:
    """Decayed counts of how responses ended: what the curve of a drifting policy is estimated from."""

    def __init__(self, grid: LengthGrid, *, prior_weight: float = 1.0) -> None:
        self.grid = grid
        self.prior_weight = prior_weight
        self.ended_J = np.zeros(len(grid))
        self.censored_J = np.zeros(len(grid))
        self._hazard_J = scale_free_hazard(grid)

    def add(self, lengths: np.ndarray, censored: np.ndarray) -> None:
        """Count responses of ``lengths`` (int [n]); ``censored`` (bool [n]) were cut off there and wanted more."""
        bins = self.grid.bin_of[lengths]
        self.ended_J += np.bincount(bins[~censored], minlength=len(self.grid))
        self.censored_J += np.bincount(bins[censored], minlength=len(self.grid))

    def age(self, factor: float) -> None:
        """Let everything counted so far weigh ``factor`` times as much."""
        self.ended_J *= factor
        self.censored_J *= factor

    def curve(self, generated: np.ndarray | None = None) -> Curve:
        """The estimate; ``generated`` (int [n]) are sequences still alive: cut off where they are now, for the moment.

        Leaving those out would make every batch look short until its last response has ended.
        """
        censored = self.censored_J
        if generated is not None and len(generated):
            censored = censored + np.bincount(self.grid.bin_of[generated], minlength=len(self.grid))
        survival = product_limit(self.ended_J, censored, self._hazard_J, self.prior_weight)
        return Curve(self.grid, spread(survival, self.ended_J))

    def moved_to(self, grid: LengthGrid) -> LengthCounts:
        """The same counts under another cap: what ended beyond a lower cap was cut off at it."""
        moved = LengthCounts(grid, prior_weight=self.prior_weight)
        edges = self.grid.edges
        bins = grid.bin_of[np.minimum(edges, grid.max_tokens)]
        beyond = edges > grid.max_tokens
        moved.ended_J += np.bincount(bins, np.where(beyond, 0.0, self.ended_J), minlength=len(grid))
        moved.censored_J += np.bincount(bins, self.censored_J + np.where(beyond, self.ended_J, 0.0), len(grid))
        return moved
