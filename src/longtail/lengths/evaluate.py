"""How well scores rank lengths: Kendall's tau-b with an interval, pair accuracy, deciles, calibration.

Everything in an :class:`Evaluation` is plain, strict JSON: a figure that does not exist is None, and ``reasons`` says
why. Rows of different sources are never compared: figures over several sources count pairs within each source only.

A censored length is a lower bound. Tau, deciles and calibration take it as it stands; pair accuracy leaves out the
pairs whose order it leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import kendalltau, rankdata

from longtail.lengths.data_values import LengthData

DECILES = 10
RESAMPLE_MOST = 10_000
"""Above this many rows a bootstrap resample has only this many, and the interval is narrowed by the square root of
the ratio (m-out-of-n bootstrap, Bickel et al. 1997)."""
LEAST_ROWS = 10
"""With fewer rows resamples say nothing about the interval."""
EXACT_PAIRS = 10_000
"""Up to this many rows of a source all pairs are counted, above that SAMPLED_PAIRS of them, drawn with the seed."""
SAMPLED_PAIRS = 5_000_000
LEVEL = 0.95


class Bin(NamedTuple):
    """Prompts with a predicted quantile in [low, high): how many, and the mean predicted and true quantile."""

    low: float
    high: float
    n: int
    predicted: float | None
    actual: float | None


@dataclass(frozen=True)
class Calibration:
    """``uniform_error``: largest distance of the predicted quantiles' distribution from the uniform one (0 is perfect,
    1 the worst; Kolmogorov-Smirnov). ``mean_error``: mean over prompts of |mean predicted - mean true quantile| of
    their bin; it is 0 only for a perfect ranker, because the true quantiles behind an uncertain prediction average
    towards the middle.
    """

    bins: list[Bin]
    uniform_error: float
    mean_error: float


@dataclass(frozen=True)
class Evaluation:
    """Figures of n rows. ``tau`` is Kendall's tau-b, ``tau_low`` to ``tau_high`` its 95 % bootstrap interval.

    ``pair_accuracy`` is the share of ``pairs`` (lengths differ by at least ``delta`` of the longer) whose scores have
    the order of the lengths; equal scores count half. ``pairs_unknown`` pairs are left out because censoring leaves
    their order open; ``pairs_sampled``: the accuracy is of a sample of the pairs. ``deciles[i][j]`` counts rows of
    predicted decile i and true decile j. ``interval`` says how the interval was made.
    """

    n: int
    censored: int
    delta: float
    tau: float | None = None
    tau_low: float | None = None
    tau_high: float | None = None
    interval: str | None = None
    pair_accuracy: float | None = None
    pairs: int = 0
    pairs_unknown: int = 0
    pairs_sampled: bool = False
    deciles: list[list[int]] | None = None
    calibration: Calibration | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str | None:
        """Why there is no ``tau``."""
        return self.reasons.get("tau")

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        if self.calibration is not None:
            record["calibration"]["bins"] = [b._asdict() for b in self.calibration.bins]
        return record


def evaluate(
    scores: np.ndarray,
    lengths: np.ndarray,
    *,
    delta: float = 0.2,
    seed: int = 0,
    bootstrap: int = 200,
    quantiles: np.ndarray | None = None,
    censored: np.ndarray | None = None,
    sources: np.ndarray | None = None,
) -> Evaluation:
    """Judge ``scores`` [n] (higher = longer) by ``lengths`` [n]; deterministic for a seed.

    ``quantiles`` [n] are predictions in [0, 1]; ``censored`` bool [n]; ``sources`` int [n]. ``bootstrap`` resamples of
    prompts give the interval (0: none). Raises ``ValueError`` if the arrays do not fit together, or a length or a
    score is not finite.
    """
    scores, lengths = np.asarray(scores, np.float64), np.asarray(lengths, np.float64)
    n = len(lengths)
    if scores.shape != (n,):
        raise ValueError(f"{n} lengths, but scores of shape {scores.shape}")
    if not (np.isfinite(scores).all() and np.isfinite(lengths).all()):
        bad = [int((~np.isfinite(values)).sum()) for values in (scores, lengths)]
        raise ValueError(f"{bad[0]} scores and {bad[1]} lengths are not finite")
    cut = np.zeros(n, bool) if censored is None else np.asarray(censored, bool)
    groups = _groups(np.zeros(n, np.int32) if sources is None else np.asarray(sources))
    rng = np.random.default_rng(seed)
    reasons: dict[str, str] = {}
    undefined = _undefined(scores, lengths, groups)
    tau = low = high = interval = None
    if undefined:
        reasons["tau"] = undefined
    else:
        tau = _tau([_kendall(scores[g], lengths[g]) for g in groups])
        low, high, interval = _interval(scores, lengths, groups, tau, bootstrap, rng)
        if low is None:
            reasons["interval"] = "no bootstrap" if bootstrap < 1 else f"undefined: fewer than {LEAST_ROWS} rows"
    pairs = _sum_pairs(count_pairs(scores[g], lengths[g], cut[g], delta=delta, rng=rng) for g in groups)
    if not pairs.known:
        reasons["pair_accuracy"] = f"undefined: no two lengths of known order differ by {delta:.0%} of the longer"
    if n < 2:
        reasons["deciles"] = "undefined: fewer than two rows"
    calibration = None
    if quantiles is None:
        reasons["calibration"] = "no quantiles given"
    elif n < 2:
        reasons["calibration"] = "undefined: fewer than two rows"
    else:
        calibration = calibrate(np.asarray(quantiles, np.float64), lengths, groups)
    return Evaluation(
        n=n,
        censored=int(cut.sum()),
        delta=delta,
        tau=tau,
        tau_low=low,
        tau_high=high,
        interval=interval,
        pair_accuracy=pairs.right / pairs.known if pairs.known else None,
        pairs=pairs.known,
        pairs_unknown=pairs.unknown,
        pairs_sampled=pairs.sampled,
        deciles=None if n < 2 else _decile_counts(scores, lengths, groups),
        calibration=calibration,
        reasons=reasons,
    )


def evaluate_sources(
    data: LengthData,
    scores: np.ndarray,
    *,
    delta: float = 0.2,
    seed: int = 0,
    bootstrap: int = 200,
    quantiles: np.ndarray | None = None,
) -> tuple[Evaluation, dict[str, Evaluation]]:
    """The figures of all rows, and those of each source by name (a source without rows has none)."""

    def of(rows: np.ndarray) -> Evaluation:
        return evaluate(
            scores[rows],
            data.lengths[rows],
            delta=delta,
            seed=seed,
            bootstrap=bootstrap,
            quantiles=None if quantiles is None else quantiles[rows],
            censored=data.censored[rows],
            sources=data.sources[rows],
        )

    places = {name: np.flatnonzero(data.sources == i) for i, name in enumerate(data.source_names)}
    by_source = {name: of(rows) for name, rows in places.items() if len(rows)}
    if len(by_source) == 1:
        return next(iter(by_source.values())), by_source
    return of(np.arange(len(data))), by_source


def verdict(evaluation: Evaluation) -> str:
    """What the figures mean for a deployment, in one or two honest sentences."""
    tau = evaluation.tau
    if tau is None:
        return f"Whether prompts predict lengths here cannot be said ({evaluation.reason})."
    low, high = evaluation.tau_low, evaluation.tau_high
    if tau < 0.1:
        text = "Prompts hardly predict lengths here: ordering by these scores will bring little."
        if high is not None and high < 0:
            text = "The scores run against the lengths here: ordering by them makes things worse than arrival order."
    elif tau < 0.3:
        text = (
            "Prompts say something about lengths here: ordering will bring a part of what it could, "
            "and many pairs will still be served in the wrong order."
        )
    elif tau <= 0.5:
        text = "Prompts predict lengths well enough here for ordering to pay wherever requests wait in a queue."
    else:
        text = (
            "Prompts predict lengths strongly here, about as well as one model's lengths predict another's: "
            "ordering comes close to what it can bring."
        )
    if low is not None and high is not None and _band(low) != _band(high):
        text += f" With {evaluation.n:,} rows that is not certain: tau may lie anywhere from {low:.2f} to {high:.2f}."
    if evaluation.n and evaluation.censored > 0.2 * evaluation.n:
        share = evaluation.censored / evaluation.n
        text += f" {share:.0%} of the answers were cut off at a limit, so how the longest ones compare is not known."
    return text


def _band(tau: float) -> int:
    return int(np.searchsorted([0.1, 0.3, 0.5], tau, side="right"))


# -- tau ------------------------------------------------------------------------------------------------------------


class _Kendall(NamedTuple):
    """Of all pairs within a source: concordant minus discordant, and how many do not tie in score, in length."""

    difference: float
    by_score: float
    by_length: float


def _groups(sources: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(sources == source) for source in np.unique(sources)]


def _undefined(scores: np.ndarray, lengths: np.ndarray, groups: Sequence[np.ndarray]) -> str | None:
    if len(lengths) < 2:
        return f"undefined: {('no rows', 'one row')[len(lengths)]}"
    inside = " within each source" if len(groups) > 1 else ""
    if all(np.ptp(lengths[g]) == 0 for g in groups):
        return f"undefined: all lengths equal{inside}"
    if all(np.ptp(scores[g]) == 0 for g in groups):
        return f"undefined: all scores equal{inside}"
    if all(np.ptp(scores[g]) == 0 or np.ptp(lengths[g]) == 0 for g in groups):
        return "undefined: no source has both different scores and different lengths"
    return None


def _kendall(scores: np.ndarray, lengths: np.ndarray) -> _Kendall:
    n = len(scores)
    total = n * (n - 1) / 2
    by_score, by_length = total - _tied(scores), total - _tied(lengths)
    if by_score == 0 or by_length == 0:
        return _Kendall(0.0, by_score, by_length)
    tau = float(kendalltau(scores, lengths).statistic)
    return _Kendall(tau * math.sqrt(by_score) * math.sqrt(by_length), by_score, by_length)


def _tied(values: np.ndarray) -> float:
    counts = np.unique(values, return_counts=True)[1].astype(np.float64)
    return float((counts * (counts - 1) / 2).sum())


def _tau(parts: Sequence[_Kendall]) -> float | None:
    """Tau-b over the pairs within sources; for one source this is scipy's. None if all pairs tie.

    A source whose lengths are all equal says nothing and is left out; one whose scores are all equal lowers tau.
    """
    parts = [p for p in parts if p.by_length > 0]
    by_score, by_length = sum(p.by_score for p in parts), sum(p.by_length for p in parts)
    if by_score == 0 or by_length == 0:
        return None
    tau = sum(p.difference for p in parts) / (math.sqrt(by_score) * math.sqrt(by_length))
    return max(-1.0, min(1.0, tau))


def _interval(
    scores: np.ndarray,
    lengths: np.ndarray,
    groups: Sequence[np.ndarray],
    tau: float | None,
    bootstrap: int,
    rng: np.random.Generator,
) -> tuple[float | None, float | None, str | None]:
    """Percentile bootstrap over prompts, resampled within each source."""
    if len(lengths) < LEAST_ROWS:
        return None, None, None
    share = min(1.0, RESAMPLE_MOST / len(lengths))
    taus = []
    for _ in range(bootstrap):
        picks = [g[rng.integers(0, len(g), max(2, round(share * len(g))) if len(g) > 1 else 1)] for g in groups]
        taus.append(_tau([_kendall(scores[pick], lengths[pick]) for pick in picks]))
    values = np.array([t for t in taus if t is not None])
    if not len(values) or tau is None:
        return None, None, None
    if share < 1.0:
        values = tau + (values - values.mean()) * math.sqrt(share)
    low, high = np.clip(np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]), -1.0, 1.0)
    size = "" if share == 1.0 else f" of {RESAMPLE_MOST:,} rows, scaled to {len(lengths):,}"
    return float(low), float(high), f"{LEVEL:.0%} percentile bootstrap over prompts, {bootstrap} resamples{size}"


# -- pairs ----------------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """``right`` of ``known`` pairs (equal scores count half); ``unknown`` ones are left open by censoring."""

    right: float
    known: int
    unknown: int
    sampled: bool


def count_pairs(
    scores: np.ndarray, lengths: np.ndarray, censored: np.ndarray, *, delta: float, rng: np.random.Generator
) -> Pairs:
    """Pairs whose lengths differ by at least ``delta`` of the longer, and are not equal."""
    n = len(lengths)
    order = np.argsort(lengths, kind="stable")
    s, x, c = scores[order], lengths[order], censored[order]
    # The partners of row i are the rows before ends[i]: those with length <= (1 - delta) * length i, and shorter.
    reach = (1 - delta) * x * (1 + 1e-12)  # the factor is for 0.7 * 10 and the like, which round downwards
    ends = np.minimum(np.searchsorted(x, reach, side="right"), np.searchsorted(x, x, side="left"))
    sampled = n > EXACT_PAIRS
    if sampled:
        total = int(ends.sum())
        longer = rng.choice(n, size=min(SAMPLED_PAIRS, total), p=ends / total) if total else np.empty(0, np.int64)
        shorter = (rng.random(len(longer)) * ends[longer]).astype(np.int64)
        difference, open_ = s[longer] - s[shorter], c[shorter]
        right = float((difference[~open_] > 0).sum() + 0.5 * (difference[~open_] == 0).sum())
        return Pairs(right, int((~open_).sum()), int(open_.sum()), True)
    known_before = np.concatenate([[0], np.cumsum(~c)])[ends]
    right = 0.0
    for i in np.flatnonzero(ends):
        below = s[: ends[i]][~c[: ends[i]]] if c.any() else s[: ends[i]]
        right += np.count_nonzero(below < s[i]) + 0.5 * np.count_nonzero(below == s[i])
    known = int(known_before.sum())
    return Pairs(right, known, int(ends.sum()) - known, False)


def _sum_pairs(parts: Iterator[Pairs]) -> Pairs:
    right, known, unknown, sampled = 0.0, 0, 0, False
    for part in parts:
        right, known, unknown = right + part.right, known + part.known, unknown + part.unknown
        sampled |= part.sampled
    return Pairs(right, known, unknown, sampled)


# -- deciles and calibration ----------------------------------------------------------------------------------------


def true_quantiles(lengths: np.ndarray, groups: Sequence[np.ndarray]) -> np.ndarray:
    """Mid-rank of each length within its source, in (0, 1)."""
    out = np.empty(len(lengths))
    for g in groups:
        out[g] = (rankdata(lengths[g]) - 0.5) / len(g)
    return out


def _decile_counts(scores: np.ndarray, lengths: np.ndarray, groups: Sequence[np.ndarray]) -> list[list[int]]:
    predicted, actual = (np.floor(true_quantiles(v, groups) * DECILES).astype(int) for v in (scores, lengths))
    counts = np.zeros((DECILES, DECILES), dtype=int)
    np.add.at(counts, (predicted, actual), 1)
    return counts.tolist()


def calibrate(quantiles: np.ndarray, lengths: np.ndarray, groups: Sequence[np.ndarray]) -> Calibration:
    """Predicted quantiles [n] in [0, 1] against the true quantiles of ``lengths``."""
    actual = true_quantiles(lengths, groups)
    places = np.clip(np.floor(quantiles * DECILES).astype(int), 0, DECILES - 1)
    bins, error = [], 0.0
    for i in range(DECILES):
        inside = places == i
        count = int(inside.sum())
        means = (float(quantiles[inside].mean()), float(actual[inside].mean())) if count else (None, None)
        bins.append(Bin(i / DECILES, (i + 1) / DECILES, count, *means))
        error += count * abs(means[0] - means[1]) if means[0] is not None and means[1] is not None else 0.0
    ordered = np.sort(quantiles)
    n = len(ordered)
    steps = np.arange(n + 1) / n
    distance = max(float(np.abs(ordered - steps[:-1]).max()), float(np.abs(steps[1:] - ordered).max()))
    return Calibration(bins, distance, error / n)
