"""What it takes to decide how pipelines share workers, and how good the decisions are by the planner's own model.

Random states (cost tables with concave decode steps, long-tailed lengths, pipelines in all stages) are planned for at
several sizes; given are medians and the slowest, of a first decision, when nothing is known of any pipeline, and of the
next one, when rollouts have gone on for some tokens and all else is as it was. On small cases the decision is compared
with the best of all ways to begin rollouts (every range of workers for each pipeline, tails merged or not) and to go on
with those under way, with everyone everywhere (greedy), and with taking turns, which is worth 1.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
from longtail.costs.interference import Interference, model_of
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, SwitchCosts, TableKey
from longtail.planner.lookahead import share, warm_up
from longtail.planner.outlook import Begin, Choice, Outlook
from longtail.planner.state import ClusterState, Live, Mode, PipelineState, Sharing, Stage, StepShape

SIZES = ((2, 2, 32), (2, 3, 32), (64, 4, 512), (1024, 32, 2048))
"""(workers, pipelines, samples of each step)."""
SMALL = ((2, 2), (4, 2), (2, 3), (8, 2))
BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 256), (128, 512, 2048)
UNLIMITED_S = 3600.0
GONE_ON = 8
"""Tokens between a decision and the next."""


def table(rng: np.random.Generator) -> CostTable:
    """A step of one worker has 5 to 15 sequences' worth of fixed time; a pair takes 0.5 to 0.65 of it."""
    each, fixed, pair = rng.uniform(2e-3, 6e-3), rng.uniform(5, 15), rng.uniform(0.5, 0.65)
    steps = {1: (fixed * each, each, 1e-6), 2: (pair * fixed * each, 0.55 * each, 6e-7)}
    return CostTable(
        key=TableKey("m", f"model {rng.integers(3)}", "float32", "shm", 1),
        measured="2026-01-01T00:00:00",
        detail="full",
        kv_heads=4,
        kv_bytes=256,
        decode={
            d: DecodeGrid(
                batches=BATCHES,
                contexts=CONTEXTS,
                seconds=tuple(tuple(base + own * n + token * n * c for c in CONTEXTS) for n in BATCHES),
            )
            for d, (base, own, token) in steps.items()
        },
        prefill={d: PrefillCosts(chunk_tokens=(64, 512), seconds_per_token=(5e-4, 4e-4)) for d in steps},
        switch=SwitchCosts(handshake_s=0.01, move_s=1e-3, move_byte_s=1e-9),
        train_token_s=float(rng.uniform(2e-4, 3e-3)),
    )


def pipeline(i: int, rng: np.random.Generator, workers: int, samples: int) -> PipelineState:
    lengths = np.clip(rng.lognormal(np.log(128), rng.uniform(0.6, 1.2), samples), 8, 2048).astype(np.int64)
    step = StepShape(
        lengths=lengths,
        prompts=np.full(samples, 100),
        prefill_tokens=100 * samples // 8,
        train_tokens=int(lengths.sum()),
        score_s=float(rng.uniform(0, 1)),
        update_s=float(rng.uniform(0.1, 0.5)),
    )
    stage = (Stage.READY, Stage.ROLLOUT, Stage.ROLLOUT, Stage.SCORE, Stage.TRAIN)[int(rng.integers(5))]
    n = int(samples * rng.uniform(0.02, 1)) if stage is Stage.ROLLOUT else 0
    live = Live(
        worker=rng.integers(0, workers, n),
        context=rng.integers(100, 800, n),
        lanes=rng.integers(100, 800, n),
        remaining=rng.integers(1, 800, n),
    )
    return PipelineState(
        name=f"p{i}",
        priority=float(rng.choice([1.0, 1.0, 2.0])),
        max_slowdown=None,
        stage=stage,
        steps_left=50,
        elapsed_s=float(rng.uniform(0, 10)) if stage is not Stage.READY else 0.0,
        step=step,
        typical=step,
        live=live,
        workers=tuple(range(workers)),
        degree=1,
        train_left=step.train_tokens // 2 if stage is Stage.TRAIN else 0,
        merges_left=2,
        costs=table(rng),
        slots=256,
        may_widen=True,
        micro_tokens=4096,
    )


def state(seed: int, workers: int, pipelines: int, samples: int) -> ClusterState:
    rng = np.random.default_rng(seed)
    made = tuple(pipeline(i, rng, workers, samples) for i in range(pipelines))
    works = [(m, k) for m in {model_of(p.costs.key) for p in made} for k in ("decode_small", "decode_large", "train")]
    pairs = list(itertools.product(sorted(works), repeat=2))
    known = Interference(
        same={pair: tuple(rng.uniform(1.0, 1.1, 3)) for pair in pairs},
        neighbour={pair: float(rng.uniform(0.95, 1.05)) for pair in pairs},
    )
    return ClusterState(workers=workers, pipelines=made, interference=known)


def later(now: ClusterState) -> ClusterState:
    """When every live sample has :data:`GONE_ON` more tokens, or has ended."""

    def gone_on(p: PipelineState) -> PipelineState:
        left = np.flatnonzero(p.live.remaining > GONE_ON)
        live = Live(
            worker=p.live.worker[left],
            context=p.live.context[left] + GONE_ON,
            lanes=p.live.lanes[left] + GONE_ON,
            remaining=p.live.remaining[left] - GONE_ON,
        )
        return replace(p, live=live, elapsed_s=p.elapsed_s + 1.0) if len(left) else p

    return replace(now, pipelines=tuple(gone_on(p) for p in now.pipelines))


def times(workers: int, pipelines: int, samples: int, seeds: range) -> dict[str, float]:
    """Milliseconds of a first decision, and of the next one with the first as the last; of processor time, which other
    programs on the machine change less than they change the time that passes."""
    first, following, shared = [], [], 0
    for seed in seeds:
        now = state(seed, workers, pipelines, samples)
        then = later(now)
        start = time.process_time()
        sharing = share(now, budget_s=UNLIMITED_S)
        middle = time.process_time()
        share(then, budget_s=UNLIMITED_S, before=sharing)
        first.append(1e3 * (middle - start))
        following.append(1e3 * (time.process_time() - middle))
        shared += sharing.mode is Mode.SHARE
    medians = statistics.median(first), statistics.median(following)
    print(f"{workers} workers, {pipelines} pipelines: {medians[0]:.1f} ms, then {medians[1]:.1f} ms", flush=True)
    return {
        "median_ms": round(medians[0], 2),
        "slowest_ms": round(max(first), 2),
        "next_median_ms": round(medians[1], 2),
        "next_slowest_ms": round(max(following), 2),
        "share_of_states_shared": round(shared / len(seeds), 2),
    }


def quality(workers: int, pipelines: int, seeds: range) -> dict[str, float]:
    """The values of decisions over those of the best of all, medians and the worst; and of greedy ones."""
    ahead, greedy, turns = [], [], []
    for seed in seeds:
        now = state(seed, workers, pipelines, 8 * workers)
        look = Outlook(now, merges=True)
        best = max(1.0, max(look.value(choice) for choice in everything(look)))
        ahead.append(worth(share(now, budget_s=UNLIMITED_S), look) / best)
        everywhere, stay = (Begin(0, look.cells.count, True),) * pipelines, (0,) * pipelines
        greedy.append(look.value(chosen(look, everywhere, stay)) / best)
        turns.append(1.0 / best)
    print(f"{workers} workers, {pipelines} pipelines: {statistics.median(ahead):.3f} of the best", flush=True)
    return {
        "ahead_over_best": round(statistics.median(ahead), 4),
        "ahead_over_best_worst": round(min(ahead), 4),
        "greedy_over_best": round(statistics.median(greedy), 4),
        "turns_over_best": round(statistics.median(turns), 4),
    }


def everything(look: Outlook) -> Iterator[Choice]:
    """Each pipeline on each range of cells that ``counts`` allows, tails merged or not; with each thing that may be
    done with the rollouts under way."""
    ranges = [
        Begin(first, count, merged)
        for count in look.cells.counts
        for first in range(look.cells.count - count + 1)
        for merged in (False, True)
    ]
    for nows in itertools.product(*[range(max(1, len(found))) for found in look.alternatives]):
        for begins in itertools.product(ranges, repeat=len(look.prospects)):
            yield chosen(look, begins, nows)


def chosen(look: Outlook, begins: tuple[Begin, ...], nows: tuple[int, ...]) -> Choice:
    return Choice(begins, nows, tuple(look.priorities.tolist()))


def worth(sharing: Sharing, look: Outlook) -> float:
    """The value of a decision, from its rates; taking turns is worth 1."""
    if sharing.mode is Mode.HOLD:
        return 1.0
    rates = np.array([sharing.rates[p.state.name] for p in look.prospects])
    return float((rates * look.priorities).sum() / look.priorities.mean())


def main() -> None:
    arguments = common.parser(__doc__ or "").parse_args()
    warm_up()
    share(state(0, 4, 3, 32))
    count = 5 if arguments.quick else 25
    seeds = range(1, 1 + count)
    sizes = {f"{w} workers, {p} pipelines": times(w, p, n, seeds) for w, p, n in SIZES}
    small = {
        f"{w} workers, {p} pipelines": quality(w, p, range(1, 1 + (4 if arguments.quick else 12))) for w, p in SMALL
    }
    worst = min(case["ahead_over_best"] for case in small.values())
    at_64, at_1024 = (sizes[f"{w} workers, {p} pipelines"] for w, p, _ in SIZES[-2:])
    common.finish(
        "planning",
        quick=arguments.quick,
        seeds=list(seeds),
        arms={"times": sizes, "quality": small},
        targets=[
            common.target("ms_at_64_workers_4_pipelines", at_64["median_ms"], "< 5", at_64["median_ms"] < 5),
            common.target("next_ms_at_64_workers", at_64["next_median_ms"], "< 5", at_64["next_median_ms"] < 5),
            common.target("ms_at_1024_workers_32_pipelines", at_1024["median_ms"], "< 50", at_1024["median_ms"] < 50),
            common.target("next_ms_at_1024_workers", at_1024["next_median_ms"], "< 50", at_1024["next_median_ms"] < 50),
            common.target("ahead_over_exhaustive", worst, ">= 0.98", worst >= 0.98),
        ],
    )


if __name__ == "__main__":
    main()
