"""How long the live samples of a rollout will still run, as equally likely outcomes.

Either the beliefs say so (``lengths/beliefs.py``), sharpened by how far each sample has come and how long its
group-mates got; or, in fixed-length mode, it is known.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from longtail.core.seeds import derive_seed
from longtail.lengths.beliefs import Beliefs
from longtail.lengths.remaining import Remaining

OUTCOMES = 32


class LiveLengths(Protocol):
    """Samples are numbered prompt by prompt, as in :class:`~longtail.runtime.step.StepBatch`."""

    def ended(self, sample: int, tokens: int, *, censored: bool) -> None:
        """``censored``: it was cut off, not at its end."""

    def remaining(self, samples: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Tokens still to come, int64 [K, n], each at least 1, of live ``samples`` [n] that have ``generated`` [n]."""
        ...

    def expected(self, samples: np.ndarray, generated: np.ndarray) -> np.ndarray:
        """Their mean, float64 [n], in a tenth of the time."""
        ...


class KnownLengths:
    """``lengths`` int64 [S] are those that all samples of the step will have."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths

    def ended(self, sample: int, tokens: int, *, censored: bool) -> None:
        pass

    def remaining(self, samples: np.ndarray, generated: np.ndarray) -> np.ndarray:
        return np.maximum(self._lengths[samples] - generated, 1)[None, :]

    def expected(self, samples: np.ndarray, generated: np.ndarray) -> np.ndarray:
        return self.remaining(samples, generated)[0].astype(float)


class BelievedLengths:
    """``beliefs`` is a fork that nobody else uses; prompt p of ``keys`` [N] has ``group_size`` samples."""

    def __init__(
        self, beliefs: Beliefs, keys: np.ndarray, quantiles: np.ndarray | None, group_size: int, *, seed: int
    ) -> None:
        self._beliefs = beliefs
        self._rng = np.random.default_rng(derive_seed(seed, "remaining"))
        ids = np.arange(len(keys) * group_size)
        beliefs.add(ids, np.repeat(keys, group_size), None if quantiles is None else np.repeat(quantiles, group_size))

    def ended(self, sample: int, tokens: int, *, censored: bool) -> None:
        self._beliefs.end(np.array([sample]), np.array([min(tokens, self._beliefs.max_tokens)]), censored)

    def remaining(self, samples: np.ndarray, generated: np.ndarray) -> np.ndarray:
        belief, order = self._belief(samples, generated)
        levels = belief.quantiles((np.arange(OUTCOMES) + 0.5) / OUTCOMES)
        outcomes = np.empty_like(levels)
        outcomes[:, order] = self._rng.permuted(levels, axis=0)
        return np.maximum(outcomes, 1)

    def expected(self, samples: np.ndarray, generated: np.ndarray) -> np.ndarray:
        belief, order = self._belief(samples, generated)
        expected = np.empty(len(samples))
        expected[order] = belief.expected()
        return np.maximum(expected, 1.0)

    def _belief(self, samples: np.ndarray, generated: np.ndarray) -> tuple[Remaining, np.ndarray]:
        """(the belief about them, in the order of their numbers; that order)."""
        order = np.argsort(samples, kind="stable")
        self._beliefs.progress(np.minimum(generated, self._beliefs.max_tokens), samples)
        return self._beliefs.remaining(samples[order]), order
