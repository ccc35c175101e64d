"""The learning rate as a pure function of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from longtail.core.config import Train


def learning_rate(train: Train, *, step: int, steps: int) -> float:
    """Learning rate of ``step`` (0-based) of a pipeline of ``steps`` steps.

    Warm-up is ``lr * (step + 1) / warmup_steps``, so the first step already learns and the last step of warm-up
    has the full rate. Decay starts from the full rate after warm-up and would reach 0 one step after the last.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup_steps) / max(1, steps - train.warmup_steps))
    factor = 1.0 - done if train.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.lr * factor
