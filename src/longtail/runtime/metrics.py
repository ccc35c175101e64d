"""The metrics of one step (see docs/metrics): what was learned, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from longtail.core.clock import Clock
from longtail.rl.trainer import MicroStats, UpdateStats

TIMES = {"ready": "wait_s", "queued": "wait_s", "rollout": "rollout_s", "score": "score_s", "train": "train_s"}
TIMES |= {"update": "update_s"}
"""What the time of each stage counts as."""


def learning_metrics(by_number: Mapping[int, MicroStats], update: UpdateStats | None) -> dict[str, float]:
    """Means over trained tokens from the sums of each micro-batch, and what the update reported, if there was one."""
    if not by_number:
        return {}
    sums = MicroStats.total(by_number)
    tokens = max(sums.tokens, 1)
    metrics = {
        "loss": sums.loss,
        "kl": sums.kl / tokens,
        "entropy": sums.entropy / tokens,
        "clip_fraction": (sums.clipped_low + sums.clipped_high) / tokens,
        "logprob_diff_mean": sums.gap_sum / tokens,
        "logprob_diff_max": sums.gap_max,
    }
    if update is not None:
        metrics |= {"grad_norm": update.grad_norm, "lr": update.lr}
    return metrics


class StepClock:
    """When each stage of one step was entered first. ``ready``: its rollout could begin, ``queued``: its training."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entered: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        self._entered.setdefault(stage, self._clock.time())

    @property
    def start(self) -> float | None:
        """When the first stage was entered."""
        return next(iter(self._entered.values()), None)

    def seconds(self, now: float) -> dict[str, float]:
        """Of a step that ends ``now``: ``wait_s``, ``rollout_s``, ``score_s``, ``train_s``, ``update_s`` (0 for a stage
        that was left out) and ``time_s``, their sum."""
        times = dict.fromkeys(TIMES.values(), 0.0)
        for (stage, start), (_, end) in pairwise([*self._entered.items(), ("end", now)]):
            times[TIMES[stage]] += end - start
        return times | {"time_s": sum(times.values())}
