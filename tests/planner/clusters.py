"""States of clusters with several pipelines, and a simulation of them that takes one quantum after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longtail.costs.interference import UNKNOWN, Interference
from longtail.costs.table import CostTable
from longtail.planner.state import ClusterState, Live, PipelineState, Stage, StepShape
from planner.rollouts import table

STEPS = {1: (0.04, 0.006, 1e-6), 2: (0.024, 0.0035, 6e-7)}
"""As on a machine with two workers where a pair takes little more than half the time of one."""


def costs(*, train_token_s: float = 1e-3, **more: float) -> CostTable:
    from dataclasses import replace

    steps = {"handshake_s": 0.01, "prefill_s": 4e-4} | more
    return replace(table(STEPS, **steps), train_token_s=train_token_s)  # type: ignore[arg-type]


def long_tailed(n: int, *, most: int = 1024, seed: int = 0) -> np.ndarray:
    """Lengths: many short, few long."""
    draws = np.random.default_rng(seed).lognormal(np.log(most / 8), 1.0, n)
    return np.clip(draws, 8, most).astype(np.int64)


def shape(
    lengths: Sequence[int] | np.ndarray,
    *,
    prompt: int = 50,
    group: int = 8,
    score_s: float = 0.1,
    update_s: float = 0.2,
) -> StepShape:
    lengths = np.asarray(lengths, np.int64)
    n = len(lengths)
    return StepShape(
        lengths=lengths,
        prompts=np.full(n, prompt, np.int64),
        prefill_tokens=prompt * -(-n // group),
        train_tokens=int(lengths.sum()) + prompt * -(-n // group),
        score_s=score_s,
        update_s=update_s,
    )


NOBODY = Live(
    worker=np.zeros(0, np.int64),
    context=np.zeros(0, np.int64),
    lanes=np.zeros(0, np.int64),
    remaining=np.zeros(0, np.int64),
)


def live(worker: Sequence[int], remaining: Sequence[int], *, context: int = 200, waiting: int = 0) -> Live:
    n = len(worker)
    contexts = np.full(n, context, np.int64)
    return Live(
        worker=np.asarray(worker, np.int64),
        context=contexts,
        lanes=np.where(np.arange(n) >= n - waiting, 0, contexts),
        remaining=np.asarray(remaining, np.int64),
    )


def pipeline(
    name: str,
    step: StepShape,
    *,
    stage: Stage = Stage.READY,
    rollout: Live = NOBODY,
    workers: Sequence[int] = (),
    priority: float = 1.0,
    max_slowdown: float | None = None,
    steps_left: int = 100,
    elapsed_s: float = 0.0,
    merges_left: int = 2,
    train_left: int = 0,
    degree: int = 1,
    table: CostTable | None = None,
    slots: int = 256,
    may_widen: bool = True,
    stale_steps: int = 0,
    present: StepShape | None = None,
) -> PipelineState:
    return PipelineState(
        name=name,
        priority=priority,
        max_slowdown=max_slowdown,
        stage=stage,
        steps_left=steps_left,
        elapsed_s=elapsed_s,
        step=present or step,
        typical=step,
        live=rollout,
        workers=tuple(workers),
        degree=degree,
        train_left=train_left,
        merges_left=merges_left,
        costs=table or costs(),
        slots=slots,
        may_widen=may_widen,
        stale_steps=stale_steps,
    )


def cluster(workers: int, *pipelines: PipelineState, interference: Interference = UNKNOWN) -> ClusterState:
    return ClusterState(workers=workers, pipelines=pipelines, interference=interference)
