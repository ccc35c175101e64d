"""Group-relative advantages of GRPO (arXiv 2402.03300, section 4.1.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from longtail.core.errors import RewardError

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as TRL does; spreads far below it give advantages near 0."""

NOISE = 8 * float(np.finfo(np.float32).eps)
"""A spread (max - min) within this fraction of the largest absolute reward is rounding noise of float32 rewards."""


def group_advantages(rewards: Sequence[float | None], *, scale: Literal["group", "none"] = "group") -> np.ndarray:
    """Advantages float64 ``[G]`` of the samples of one prompt.

    ``A_i = (r_i - mean(r)) / (std(r) + 1e-4)`` with the unbiased standard deviation, or ``r_i - mean(r)`` for
    ``scale="none"`` (Dr. GRPO, arXiv 2503.20783). A group without spread beyond float32 noise gets exactly 0.

    A reward of None excludes its sample from mean and deviation, and its advantage is NaN: leave the sample out
    of the training batch. Raises :class:`RewardError` for a reward that is NaN or infinite.
    """
    valid = np.array([r is not None for r in rewards], dtype=bool)
    values = np.array([r for r in rewards if r is not None], dtype=np.float64)
    for i, r in enumerate(rewards):
        if r is not None and not math.isfinite(r):
            raise RewardError(f"the reward of sample {i} of a group is {r}; rewards must be finite numbers or None")
    advantages = np.full(len(valid), np.nan)
    advantages[valid] = _normalised(values, scale)
    return advantages


def _normalised(values: np.ndarray, scale: Literal["group", "none"]) -> np.ndarray:
    if len(values) < 2 or np.ptp(values) <= NOISE * np.abs(values).max():
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred if scale == "none" else centred / (values.std(ddof=1) + STD_EPSILON)
