"""What a sequence's prompt and its group-mates say about its normal score: a one-way model with random prompts.

The score of sample i of prompt p is

    z_pi = m_p + e_pi,   m_p ~ N(rho * u_p, 1 - rho^2 - within),   e_pi ~ N(0, within * (1 + tilt * m_p)),
    or, with probability ``outlier``,   z_pi ~ N(0, 1)

u_p is the normal score of the ranker's quantile. Prompts of long answers vary more than those of one-word answers, even
on this scale: hence the tilt. An outlier (a degenerate loop, a refusal) tells nothing of its prompt. A response that
ended gives z; one that was cut off, and one that is still alive, gives only z > its score so far.

The posterior of m_p is found by expectation propagation (Minka 2001): each row contributes a Gaussian site, a bounded
row by matching the moments of the truncated normal. What the other rows say of a row is its *cavity*, and that is
exactly what its prediction needs: a live row's z is N(mean, sd^2) of its cavity, truncated to z > its score so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longtail.lengths import normal
from longtail.lengths.history import Recalled

SWEEPS = 3
DAMPING = 0.9
"""Chosen together: means within 0.15 standard deviations of the fixed point where 64 samples are all alive far out in
the tail (the slowest case), within 0.02 in groups of 8 of which one has ended.
"""
LEAST_TILTED, MOST_TILTED = 0.4, 1.8
"""Limits of 1 + tilt * m."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """``rho``: correlation of the ranker's normal score with z. ``within``: variance among samples of one prompt of
    mean 0. ``tilt``: its relative growth per unit of the prompt's mean. ``outlier``: share of rows that ignore their
    prompt. ``drift``: variance that a prompt's mean gains between visits.
    """

    rho: float
    within: float
    tilt: float
    outlier: float
    drift: float

    def within_at(self, mean: np.ndarray) -> np.ndarray:
        return self.within * np.minimum(np.maximum(1.0 + self.tilt * mean, LEAST_TILTED), MOST_TILTED)

    def faded(self, samples: np.ndarray) -> np.ndarray:
        """How many responses of today those of the last visit are worth, as the prompt's mean has drifted since."""
        return samples * self.within / (self.within + samples * self.drift)


class Evidence(NamedTuple):
    """Rows [N] of groups 0..G-1; the first ``bounded`` of them only say z > score, the others z = score."""

    score: np.ndarray
    group: np.ndarray
    bounded: int


class Prior(NamedTuple):
    """Gaussian knowledge of the prompts' means before the rows: precision [G] and precision * mean [G]."""

    precision: np.ndarray
    shift: np.ndarray


class Posterior(NamedTuple):
    """``mean`` and ``sd`` [N]: each row's z given all other rows (its cavity); ``keep`` [N]: 1 - P(outlier).

    ``precision``, ``shift`` [G]: what the rows say of the means, without the prior; ``within`` [G].
    """

    mean: np.ndarray
    sd: np.ndarray
    keep: np.ndarray
    precision: np.ndarray
    shift: np.ndarray
    within: np.ndarray


def prior(u: np.ndarray, recalled: Recalled, params: Params) -> Prior:
    """From the ranker's scores ``u`` [G] (NaN: not ranked) and what is remembered of each prompt, one visit old."""
    ranked = ~np.isnan(u)
    explained = np.where(ranked, params.rho**2, 0.0)
    precision = 1.0 / (1.0 - explained - params.within)
    shift = precision * np.where(ranked, params.rho * u, 0.0)
    known = params.faded(recalled.samples) / params.within_at(recalled.average)
    return Prior(precision + known, shift + known * recalled.average)


def outlook(prior: Prior, params: Params) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (float32 [G]) of the z of a sequence of which nothing else is known."""
    mean = prior.shift / prior.precision
    sd = np.sqrt(1.0 / prior.precision + params.within_at(mean))
    return mean.astype(np.float32), sd.astype(np.float32)


def posterior(prior: Prior, rows: Evidence, params: Params, *, wanted: int | None = None) -> Posterior:
    """Expectation propagation, :data:`SWEEPS` parallel sweeps from empty sites: a pure function, no warm start.

    ``mean`` and ``sd`` are of the first ``wanted`` rows only (None: all).
    """
    score, group, bounded = rows
    groups = len(prior.precision)
    known_precision, known_shift = prior.precision.astype(np.float32), prior.shift.astype(np.float32)
    normal_share, outlier = 1.0 - params.outlier, params.outlier
    exact = score[bounded:]
    outlier_tail, outlier_exact = outlier * normal.survival(score[:bounded]), outlier * normal.density(exact)
    keep = np.full(len(score), normal_share, np.float32)
    site_precision, site_shift = np.zeros((2, len(score)), np.float32)
    site_precision[bounded:] = normal_share / params.within
    site_shift[bounded:] = site_precision[bounded:] * exact
    for sweep in range(SWEEPS + 1):
        precision_G = np.bincount(group, site_precision, groups).astype(np.float32)
        shift_G = np.bincount(group, site_shift, groups).astype(np.float32)
        total_precision_G, total_shift_G = known_precision + precision_G, known_shift + shift_G
        within_G = params.within_at(total_shift_G / total_precision_G)
        # Ended rows settle faster than bounded ones: every other sweep leaves them as they are.
        part = slice(wanted) if sweep == SWEEPS else slice(bounded) if sweep % 2 else slice(None)
        within = within_G.take(group[part])
        cavity_precision = total_precision_G.take(group[part]) - site_precision[part]
        cavity_shift = total_shift_G.take(group[part]) - site_shift[part]
        variance = 1.0 / cavity_precision
        mean = cavity_shift * variance
        square = variance + within
        sd = np.sqrt(square)
        if sweep == SWEEPS:
            break
        x = (score[part] - mean) / sd
        cut, moved = x[:bounded], variance[:bounded]
        likely = normal_share * normal.survival(cut)
        kept = keep[:bounded] = likely / (likely + outlier_tail)
        # The truncated normal's moments, as a site: precision d / (s^2 - v d) with d = mills (mills - x).
        mills = normal.inverse_mills(cut)
        shrink = mills * (mills - cut)
        precision = shrink / (square[:bounded] - moved * shrink)
        pull = moved * mills / sd[:bounded]
        shift = pull * cavity_precision[:bounded] + (mean[:bounded] + pull) * precision
        site_precision[:bounded] += DAMPING * (kept * precision - site_precision[:bounded])
        site_shift[:bounded] += DAMPING * (kept * shift - site_shift[:bounded])
        if sweep % 2 == 0:
            likely = normal_share * normal.density(x[bounded:]) / sd[bounded:]
            kept = keep[bounded:] = likely / (likely + outlier_exact)
            site_precision[bounded:] = kept / within[bounded:]
            site_shift[bounded:] = site_precision[bounded:] * exact
    return Posterior(mean, sd, keep, precision_G, shift_G, within_G)
