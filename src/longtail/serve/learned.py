"""What served requests teach: how long answers get, whether the ranker still ranks, how much work is left.

Lengths are tokens of one answer. Answers that were cut off count with the length that they had.
"""

from __future__ import annotations

import math

import numpy as np

from longtail.lengths.correlation import tau_b

KEPT, RANKED = 2_000, 500
"""So many of the latest answers count for expected lengths, and of those with a quantile for tau."""
PRIOR_TOKENS, PRIOR_ANSWERS = 256.0, 4.0
"""Before anything is known it is as if so many answers of this length had been served."""
BINS = 10
_FROM_ALL = 8.0
"""A bin of quantiles counts as much against the mean of all as it has answers compared to this."""
_NEIGHBOUR = 0.25
"""Weight of an answer in the bins next to its own."""
LEAST_PAIRS, NEW_PAIRS = 50, 20
SPEED_MEMORY_S = 30.0
"""Busy seconds after which the speed of then counts for a third."""
LEAST_BUSY_S = 1.0
"""Before, a speed is not known: two answers that end together would make it enormous."""


class Served:
    """The latest answers of this process. ``tau_reason`` says why the last :meth:`tau` was None."""

    def __init__(self) -> None:
        self._quantiles = np.full(KEPT, np.nan)
        self._tokens = np.zeros(KEPT)
        self._cut = np.zeros(KEPT, bool)
        self._count = 0
        # Sums over the ring; the last bin is for answers without a quantile.
        self._bin_tokens, self._bin_answers = np.zeros(BINS + 1), np.zeros(BINS + 1)
        self._curve: np.ndarray | None = None
        self._tau: float | None = None
        self._new_pairs = NEW_PAIRS
        self.tau_reason: str | None = None
        self._ticked: tuple[float, float, int] | None = None
        self._busy_tokens = self._busy_s = 0.0

    def observe(self, quantile: float | None, tokens: float, cut: bool) -> None:
        """One answer: the quantile that it was ranked by (None if it was not), its mean length over samples, and
        whether it was cut off."""
        place = self._count % KEPT
        if self._count >= KEPT:
            self._add(place, -1)
        self._quantiles[place] = np.nan if quantile is None else quantile
        self._tokens[place], self._cut[place] = tokens, cut
        self._count += 1
        self._add(place, +1)
        self._new_pairs += quantile is not None
        self._curve = None

    def expected_tokens(self, quantile: float | None, max_tokens: int | None) -> float:
        """The mean length of answers that were ranked alike, smoothed; of all where ``quantile`` is None. Never above
        ``max_tokens``."""
        mean = self._mean() if quantile is None else self._at(quantile)
        return mean if max_tokens is None else min(mean, float(max_tokens))

    def cut_share(self) -> float | None:
        """The share of answers that were cut off; None before the first. Where it is large, tau says little."""
        kept = min(self._count, KEPT)
        return float(self._cut[:kept].mean()) if kept else None

    def tau(self) -> float | None:
        """Kendall's tau-b of quantile and length over the last 500 ranked answers: 1 is perfect, 0 chance.

        None if it is not known; ``tau_reason`` has why. Computed anew once 20 more answers are known.
        """
        if self._new_pairs >= NEW_PAIRS or self._tau is None:
            newest_first = (self._count - 1 - np.arange(min(self._count, KEPT))) % KEPT
            ranked = newest_first[~np.isnan(self._quantiles[newest_first])][:RANKED]
            self._tau, self.tau_reason = _tau(self._quantiles[ranked], self._tokens[ranked])
            self._new_pairs = 0
        return self._tau

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second while requests were in flight, of late; None if it is not known yet."""
        return self._busy_tokens / self._busy_s if self._busy_s >= LEAST_BUSY_S else None

    def tick(self, now_s: float, total_output_tokens: float, in_flight: int) -> None:
        """Take note of the tokens since the start of the process; about once a second.

        A stretch between two ticks counts if something was in flight at both of its ends. A total that falls (an
        estimate that was corrected) starts a new stretch.
        """
        before, self._ticked = self._ticked, (now_s, total_output_tokens, in_flight)
        if before is None:
            return
        then_s, then_tokens, were_in_flight = before
        stretch_s, tokens = now_s - then_s, total_output_tokens - then_tokens
        if stretch_s <= 0:
            self._ticked = before
        elif were_in_flight and in_flight and tokens >= 0:
            kept = math.exp(-stretch_s / SPEED_MEMORY_S)
            self._busy_tokens = kept * self._busy_tokens + tokens
            self._busy_s = kept * self._busy_s + stretch_s

    def _add(self, place: int, sign: int) -> None:
        quantile = self._quantiles[place]
        index = BINS if math.isnan(quantile) else min(BINS - 1, max(0, int(quantile * BINS)))
        self._bin_tokens[index] += sign * self._tokens[place]
        self._bin_answers[index] += sign

    def _mean(self) -> float:
        tokens, answers = self._bin_tokens.sum(), self._bin_answers.sum()
        return float((tokens + PRIOR_ANSWERS * PRIOR_TOKENS) / (answers + PRIOR_ANSWERS))

    def _at(self, quantile: float) -> float:
        """Straight lines between the means of the bins, which stand for their middles."""
        if self._curve is None:
            kernel = np.array([_NEIGHBOUR, 1.0, _NEIGHBOUR])
            tokens = np.convolve(self._bin_tokens[:BINS], kernel, "same")
            answers = np.convolve(self._bin_answers[:BINS], kernel, "same")
            self._curve = (tokens + _FROM_ALL * self._mean()) / (answers + _FROM_ALL)
        x = min(BINS - 1.0, max(0.0, quantile * BINS - 0.5))
        left = min(BINS - 2, int(x))
        share = x - left
        return float((1 - share) * self._curve[left] + share * self._curve[left + 1])


def _tau(x: np.ndarray, y: np.ndarray) -> tuple[float | None, str | None]:
    """Tau of quantiles and lengths [n], or None and why it is not known."""
    if len(x) < LEAST_PAIRS:
        return None, f"{len(x)} ranked answers are known, {LEAST_PAIRS} are needed"
    tau = tau_b(x, y)
    if tau is None:
        return None, f"all {'quantiles' if (x == x[0]).all() else 'lengths'} are equal"
    return tau, None
