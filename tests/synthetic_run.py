"""The events of a made-up run with everything in it: two pipelines, two workers, a kill, a resume, a rollback.

What is true of it, for tests to compare with:

* ``sums`` wants 20 steps, ``collatz`` 10. The first start is killed (no ``RunEnded``) after 8 and 6 steps; the
  second resumes ``sums`` from 5 and ``collatz`` from 5, an hour later. ``sums`` loses worker 1 in its second life
  after step 12 and falls back to step 10. ``collatz`` fails in its step 9.
* As everywhere in events, ``step`` is the number of steps done before; here and in displays steps count from 1.
* Every step takes ``STEP_S`` seconds and has ``SAMPLES`` samples of 10, 20, 30 ... tokens. A valid step of ``sums``
  has reward ``0.05 x step``, one of ``collatz`` ``0.1 x step``; a step that a rollback makes void has ``VOID``.
* Both workers are busy for ``BUSY`` of every step of ``sums``. Half-way through its rollout they become a group of two,
  which was predicted to gain ``PREDICTED_S`` and gained ``GAINED_S``; in step ``REFUSED`` that was refused.
* Every step would have taken ``ALONE_S`` alone. The pipelines share side by side, except for the first ``TURNS_S`` of
  the second start.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from longtail.core.events import (
    CheckpointSaved,
    Event,
    MoveEnded,
    MoveMade,
    Note,
    PipelineEnded,
    PipelineStarted,
    Planned,
    Progress,
    Rollback,
    RunEnded,
    RunStarted,
    SequenceEnded,
    Span,
    StageEntered,
    StepEnded,
    WorkerLost,
)

START = 1_790_000_000.0
RESUMED = START + 3600.0
STEP_S = 2.0
BUSY = 0.75
SAMPLES = 4
TOKENS = 100  # 10 + 20 + 30 + 40
VOID = 1e6
PREDICTED_S, GAINED_S, COST_S = 0.5, 0.25, 0.005
REFUSED = 15
ALONE_S = 1.6
TURNS_S = 2 * STEP_S
SHARED_RATES, TURNS_RATES = {"sums": 0.75, "collatz": 0.5}, {"sums": 0.5, "collatz": 0.45}


def two_pipelines() -> Iterator[Event]:
    """All events, in the order in which a controller would write them."""
    yield from _start(START, resumed=False)
    yield from _pipeline_started(START, "sums", 0, 20)
    yield from _pipeline_started(START, "collatz", 0, 10)
    yield planned(START, "share", SHARED_RATES)
    for step in range(1, 9):
        t = START + (step - 1) * STEP_S
        sums = step_events(t, "sums", step, reward=VOID if step > 5 else 0.05 * step, workers=2)
        collatz = step_events(t, "collatz", step, reward=VOID if step > 5 else 0.1 * step) if step <= 6 else ()
        yield from heapq.merge(sums, collatz, key=lambda event: event.t)
        if step == 5:
            yield from _checkpoints(t + STEP_S, step, "sums", "collatz")

    yield from _start(RESUMED, resumed=True)
    yield from _pipeline_started(RESUMED, "sums", 5, 20, reason="resumed from checkpoint")
    yield from _pipeline_started(RESUMED, "collatz", 5, 10)
    yield planned(RESUMED, "hold", TURNS_RATES)
    t = RESUMED
    for step in range(6, 13):
        if t == RESUMED + TURNS_S:
            yield planned(t, "share", SHARED_RATES)
        if step == 9:
            error = "reward my_rewards:chain returned 7 values for 16 completions (step 9)."
            yield PipelineEnded(t=t, pipeline="collatz", step=8, reason="failed", error=error)
        sums = step_events(t, "sums", step, reward=VOID if step > 10 else 0.05 * step, workers=2)
        collatz = step_events(t, "collatz", step, reward=0.1 * step) if step < 9 else ()
        yield from heapq.merge(sums, collatz, key=lambda event: event.t)
        t += STEP_S
        if step == 10:
            yield from _checkpoints(t, step, "sums")
    yield WorkerLost(t=t, worker=1, reason="its process ended (signal 9)")
    yield from _pipeline_started(t, "sums", 10, 20, reason="worker 1 was lost")
    for step in range(11, 21):
        yield from step_events(t, "sums", step, reward=0.05 * step, workers=2)
        t += STEP_S
    yield StageEntered(t=t, pipeline="sums", step=20, stage="checkpoint")
    yield from _checkpoints(t, 20, "sums")
    yield PipelineEnded(t=t, pipeline="sums", step=20, reason="finished")
    yield RunEnded(t=t, reason="finished")


FIRST_LIFE_S = 8 * STEP_S
SECOND_LIFE_S = 17 * STEP_S


def step_events(
    t: float, pipeline: str, step: int, *, reward: float, workers: int = 0, metrics: dict[str, float] | None = None
) -> Iterator[Event]:
    """Step number ``step`` (from 1) of ``STEP_S`` seconds: half rollout, half training, on ``workers`` busy workers."""
    half, busy_s = STEP_S / 2, BUSY * STEP_S / 2
    yield StageEntered(t=t, pipeline=pipeline, step=step - 1, stage="rollout")
    for worker in range(workers):
        yield Progress(
            t=t, worker=worker, pipeline=pipeline, substage="decode", waiting=0, running=2, lanes_used=6, lanes_total=96
        )
    if workers == 2:
        yield from _rollout_that_widens(t, pipeline, step - 1, busy_s)
    else:
        for worker in range(workers):
            yield _span(t, t + half, worker, pipeline, "decode", step - 1, busy_s, tokens=TOKENS // workers)
    for sample in range(SAMPLES):
        yield SequenceEnded(
            t=t + half, pipeline=pipeline, step=step - 1, prompt=sample // 2, sample=sample % 2, worker=sample % 2,
            prompt_tokens=12, tokens=10 * (sample + 1), finish="stop", preemptions=0, start=t, end=t + half,
        )  # fmt: skip
    yield StageEntered(t=t + half, pipeline=pipeline, step=step - 1, stage="score")
    yield StageEntered(t=t + half, pipeline=pipeline, step=step - 1, stage="train")
    for worker in range(workers):
        yield _span(t + half, t + STEP_S, worker, pipeline, "train", step - 1, busy_s, tokens=TOKENS)
    if workers == 2:
        refused = "12 blocks are free, and 40 are needed" if step == REFUSED else None
        yield MoveEnded(
            t=t + STEP_S, pipeline=pipeline, step=step - 1, move="widen", workers=[0, 1], cost_s=COST_S,
            moved_bytes=0 if refused else 3 << 20, recomputed_tokens=0, predicted_cost_s=0.02, refused=refused,
            **({} if refused else {"predicted_rest_s": 0.75, "rest_s": 0.5, "gain_s": GAINED_S}),
        )  # fmt: skip
    yield StepEnded(t=t + STEP_S, pipeline=pipeline, step=step - 1, metrics=step_metrics(reward) | (metrics or {}))


def _rollout_that_widens(t: float, pipeline: str, step: int, busy_s: float) -> Iterator[Event]:
    """One second of rollout on two workers: alone, then together, when each tells of all tokens."""
    middle, end = t + STEP_S / 4, t + STEP_S / 2
    for worker in range(2):
        yield _span(t, middle, worker, pipeline, "decode", step, busy_s / 2, tokens=TOKENS // 4)
    yield MoveMade(
        t=middle, pipeline=pipeline, step=step, move="widen", workers=[0, 1], reason="2 samples left", layout="TP2",
        predicted_gain_s=PREDICTED_S, predicted_cost_s=0.02,
    )  # fmt: skip
    for worker in range(2):
        yield _span(middle, middle, worker, pipeline, "switch", step, 0.0, tokens=0)
        yield _span(middle, end, worker, pipeline, "decode", step, busy_s / 2, tokens=TOKENS // 2, tp=2)


def step_metrics(reward: float) -> dict[str, float]:
    """Every metric that a controller writes."""
    return {
        "reward_mean": reward, "reward_std": 0.1, "loss": 0.01, "kl": 0.0, "grad_norm": 0.5, "lr": 1e-6, "entropy": 1.5,
        "clip_fraction": 0.0, "logprob_diff_mean": 1e-6, "logprob_diff_max": 1e-5, "sequences": SAMPLES,
        "tokens": TOKENS, "length_mean": TOKENS / SAMPLES, "length_max": 40, "truncated_fraction": 0.0,
        "flat_group_fraction": 0.25, "time_s": STEP_S, "rollout_s": STEP_S / 2, "score_s": 0.0, "train_s": STEP_S / 2,
        "update_s": 0.1, "tokens_per_s": TOKENS / STEP_S, "preemptions": 0,
        "rollout_idle_s": 0.1, "rollout_predicted_s": 0.9 * STEP_S / 2, "length_tau": 0.4, "switches": 1.0,
        "alone_s": ALONE_S, "slowdown": STEP_S / ALONE_S, "wait_s": 0.1, "staleness": 0.0,
    }  # fmt: skip


def planned(t: float, mode: str, rates: dict[str, float], *, duration_s: float = 0.004, reason: str = "") -> Planned:
    reason = reason or ("both make progress" if mode == "share" else "sharing would lose")
    return Planned(
        t=t, mode=mode, reason=reason, rates=dict(rates), weights=dict.fromkeys(rates, 1.0), duration_s=duration_s
    )


def _start(t: float, *, resumed: bool) -> Iterator[Event]:
    yield RunStarted(
        t=t, run="runs/amber-finch", version="0.1.0", workers=2, devices=["cpu", "cpu"],
        pipelines=["sums", "collatz"], resumed=resumed,
    )  # fmt: skip
    yield Note(t=t, level="info", message="training starts")


def _pipeline_started(t: float, pipeline: str, step: int, steps: int, *, reason: str = "") -> Iterator[Event]:
    if reason:
        yield Rollback(t=t, pipeline=pipeline, step=step, reason=reason)
    yield StageEntered(t=t, pipeline=pipeline, step=step, stage="load")
    yield PipelineStarted(
        t=t, pipeline=pipeline, step=step, steps=steps, model="tiny", task=pipeline, parameters=1_250_000
    )
    yield MoveMade(
        t=t, pipeline=pipeline, step=step, move="order", workers=[0, 1], reason="longest first", predicted_gain_s=1.8
    )


def _checkpoints(t: float, step: int, *pipelines: str) -> Iterator[Event]:
    for pipeline in pipelines:
        path = f"runs/amber-finch/{pipeline}/step-{step}"
        yield CheckpointSaved(t=t, pipeline=pipeline, step=step, path=path, bytes=1 << 20, duration_s=0.05)


def _span(
    start: float,
    end: float,
    worker: int,
    pipeline: str,
    substage: str,
    step: int,
    busy_s: float,
    *,
    tokens: int,
    tp: int = 1,
) -> Span:
    return Span(
        t=end, worker=worker, pipeline=pipeline, substage=substage, step=step, start=start, end=end, busy_s=busy_s,
        quanta=50, tokens=tokens, batch=2.0, tp=tp,
    )  # fmt: skip
