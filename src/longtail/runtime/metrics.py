"""The metrics of one step (see docs/metrics): what was learned, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from longtail.core.clock import Clock
from longtail.rl.trainer import MicroStats, UpdateStats


def learning_metrics(by_worker: Mapping[int, MicroStats], update: UpdateStats | None) -> dict[str, float]:
    """Means over trained tokens from the sums that workers reported, and what the update reported, if there was one."""
    if not by_worker:
        return {}
    sums = MicroStats()
    for worker in sorted(by_worker):  # in the same order every time: sums of floats depend on it
        sums += by_worker[worker]
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
    """When each stage of the current step was entered first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entered: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        self._entered.setdefault(stage, self._clock.time())

    def restart(self) -> None:
        self._entered = {}

    def seconds(self) -> dict[str, float]:
        """``rollout_s``, ``score_s``, ``train_s``, ``update_s`` (0 for a stage that was left out) and ``time_s``."""
        now = self._clock.time()
        times = dict.fromkeys(("rollout_s", "score_s", "train_s", "update_s"), 0.0)
        for (stage, start), (_, end) in pairwise([*self._entered.items(), ("end", now)]):
            times[f"{stage}_s"] = end - start
        return times | {"time_s": now - self._entered["rollout"]}
