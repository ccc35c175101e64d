"""The parameters of the latent model, learnt online from groups whose samples have all ended.

Stepwise EM (Cappé and Moulines, JRSS B 71, 2009): each step adds the expected sufficient statistics of its groups
under the current parameters to decayed ones, and the parameters are their ratios. Start values count like a fixed
number of rows, so that a few groups do not move them far, and data wins over a bad start.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from longtail.lengths import normal
from longtail.lengths.history import Recalled
from longtail.lengths.latent import Evidence, Params, Posterior, posterior, prior

ITERATIONS = 6
"""EM iterations on a step's groups: a group of 8 settles in two or three."""

START_WITHIN, WITHIN_ROWS = 0.5, 20.0
"""Half of what the ranker leaves unexplained lies between prompts."""
START_TILT, TILT_ROWS = 0.0, 100.0
START_OUTLIER, OUTLIER_ROWS = 0.05, 100.0
START_DRIFT, DRIFT_ROWS = 0.05, 10.0
RHO_ROWS = 50.0
U_ROWS = 10.0
"""A ranker's quantiles are uniform over its training prompts, hence normal scores of mean 0 and variance 1 at first."""

LEAST_WITHIN, MOST_WITHIN = 0.02, 0.98
"""Limits of ``within`` as a share of what the ranker leaves unexplained."""
MOST_TILT = 0.4
LEAST_OUTLIER, MOST_OUTLIER = 0.002, 0.3
MOST_DRIFT = 4.0
MOST_RHO = 0.99
MOST_U = 3.0
"""A prompt unlike all before it must not be believed more than the longest of a thousand."""


@dataclass(frozen=True)
class Folded:
    """Groups whose samples have all ended: ``u`` [G] standardised (NaN: not ranked), what earlier visits left, rows."""

    u: np.ndarray
    recalled: Recalled
    rows: Evidence


@dataclass
class Statistics:
    """Decayed sums: every pair is (weighted sum, weight)."""

    within: np.ndarray = field(default_factory=lambda: np.zeros(2))
    tilt: np.ndarray = field(default_factory=lambda: np.zeros(2))
    outlier: np.ndarray = field(default_factory=lambda: np.zeros(2))
    drift: np.ndarray = field(default_factory=lambda: np.zeros(2))
    rho: np.ndarray = field(default_factory=lambda: np.zeros(2))
    u: np.ndarray = field(default_factory=lambda: np.zeros(3))
    """Count, sum and sum of squares of the prompts' raw normal scores."""

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def aged(self, factor: float) -> Statistics:
        return Statistics(**{f.name: factor * getattr(self, f.name) for f in fields(self)})


class Learner:
    """Parameters and the statistics behind them; ``rho`` is where the ranker's correlation starts."""

    def __init__(self, *, rho: float) -> None:
        self.start_rho = rho
        self.statistics = Statistics()

    @property
    def params(self) -> Params:
        return self._params(self.statistics)

    def _params(self, s: Statistics) -> Params:
        def ratio(pair: np.ndarray, start: float, rows: float) -> float:
            return float((pair[0] + rows * start) / (pair[1] + rows))

        rho = float(np.clip(ratio(s.rho, self.start_rho, RHO_ROWS), -MOST_RHO, MOST_RHO))
        unexplained = 1.0 - rho**2
        within = ratio(s.within, START_WITHIN * unexplained, WITHIN_ROWS)
        return Params(
            rho=rho,
            within=float(np.clip(within, LEAST_WITHIN * unexplained, MOST_WITHIN * unexplained)),
            tilt=float(np.clip(ratio(s.tilt, START_TILT, TILT_ROWS), -MOST_TILT, MOST_TILT)),
            outlier=float(np.clip(ratio(s.outlier, START_OUTLIER, OUTLIER_ROWS), LEAST_OUTLIER, MOST_OUTLIER)),
            drift=float(np.clip(ratio(s.drift, START_DRIFT, DRIFT_ROWS), 0.0, MOST_DRIFT)),
        )

    def saw(self, raw_u: np.ndarray) -> None:
        """Count the raw normal scores [n] (NaN: not ranked) of prompts that start."""
        known = raw_u[~np.isnan(raw_u)]
        self.statistics.u += np.array([len(known), known.sum(), (known**2).sum()])

    def standardised(self, raw_u: np.ndarray) -> np.ndarray:
        """Raw normal scores against those of the prompts seen lately: a run's prompts may all rank high or low."""
        count, total, squares = self.statistics.u + np.array([U_ROWS, 0.0, U_ROWS])
        mean = total / count
        return np.clip((raw_u - mean) / np.sqrt(squares / count - mean**2), -MOST_U, MOST_U)

    def age(self, factor: float) -> None:
        self.statistics = self.statistics.aged(factor)

    def learn(self, groups: Folded) -> tuple[Posterior, Params]:
        """Take in groups; returns their posterior and the parameters that it was found with."""
        params = self.params
        for _ in range(ITERATIONS):
            known = prior(groups.u, groups.recalled, params)
            found = posterior(known, groups.rows, params)
            added = _expected(groups, found, params)
            updated, used = self._params(self.statistics + added), params
            params = updated
        self.statistics = self.statistics + added
        return found, used


def _expected(groups: Folded, found: Posterior, params: Params) -> Statistics:
    """Expected sufficient statistics of the groups (the E-step)."""
    score, group, bounded = groups.rows
    within = found.within[group]
    variance = found.sd**2 - within
    share = variance / found.sd**2
    x = (score - found.mean) / found.sd
    # z - cavity mean: known where the response ended, moments of the truncated normal where it was cut off.
    mills = normal.inverse_mills(x[:bounded])
    deviation = np.concatenate([found.sd[:bounded] * mills, score[bounded:] - found.mean[bounded:]])
    square = np.concatenate([found.sd[:bounded] ** 2 * (1.0 + x[:bounded] * mills), deviation[bounded:] ** 2])
    noise_square = (1.0 - share) ** 2 * square + share * within

    samples = groups.recalled.samples
    informed = ((np.bincount(group, minlength=len(samples)) > 1) | (samples > 0))[group]
    keep = np.where(informed, found.keep, 0.0)
    u = groups.u[group]
    ranked = ~np.isnan(u)
    u = np.where(ranked, u, 0.0)
    lean = np.where(ranked, found.keep, 0.0)
    return Statistics(
        within=np.array([(keep * noise_square * (params.within / within)).sum(), keep.sum()]),
        tilt=np.array([(keep * (noise_square / params.within - 1.0) * found.mean).sum(), (keep * found.mean**2).sum()]),
        outlier=np.array([(informed * (1.0 - found.keep)).sum(), float(informed.sum())]),
        drift=_expected_drift(groups.recalled, found, params),
        rho=np.array([(lean * u * (found.mean + deviation)).sum(), (lean * u * u).sum()]),
    )


def _expected_drift(recalled: Recalled, found: Posterior, params: Params) -> np.ndarray:
    """How much further apart the means of two visits lie than their samples explain."""
    revisited = (recalled.samples > 0) & (found.precision > 1e-6)
    variance = 1.0 / np.maximum(found.precision, 1e-6)
    chance = variance + found.within / np.maximum(recalled.samples, 1e-6)
    gap = np.where(revisited, found.shift * variance - recalled.average, 0.0)
    # Weights as maximum likelihood has them, relative to a visit of many samples.
    trust = np.where(revisited, ((params.drift + 0.05) / (params.drift + 0.05 + chance)) ** 2, 0.0)
    return np.array([(trust * (gap**2 - chance)).sum(), trust.sum()])
