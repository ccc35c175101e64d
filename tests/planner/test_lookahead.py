"""Looking ahead: whether, where and by which weights pipelines share the workers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.costs.interference import Interference, model_of
from longtail.planner import greedy
from longtail.planner.lookahead import share
from longtail.planner.outlook import Begin, Choice, Outlook
from longtail.planner.state import ClusterState, Live, Mode, PipelineState, Sharing, Stage
from planner.clusters import NOBODY, cluster, costs, live, long_tailed, pipeline, shape
from planner.rollouts import table


def two(workers: int = 2, n: int = 32, **more: float) -> ClusterState:
    return cluster(
        workers,
        pipeline("a", shape(long_tailed(n, seed=1)), **more),  # type: ignore[arg-type]
        pipeline("b", shape(long_tailed(n, seed=2)), **more),  # type: ignore[arg-type]
    )


def decide(state: ClusterState, **more: object) -> Sharing:
    return share(state, clock=lambda: 0.0, **more)  # type: ignore[arg-type]


def disturbing(state: ClusterState, factor: float) -> ClusterState:
    models = {model_of(p.costs.key) for p in state.pipelines}
    works = [(m, k) for m in models for k in ("prefill", "decode_small", "decode_large", "train")]
    pairs = [(a, b) for a in works for b in works]
    known = Interference(same=dict.fromkeys(pairs, (factor,) * 3), neighbour=dict.fromkeys(pairs, factor))
    return replace(state, interference=known)


def test_two_equal_long_tailed_pipelines_share_a_worker_each() -> None:
    sharing = decide(two())
    assert sharing.mode is Mode.SHARE
    assert sorted(sharing.begin.values()) == [(0,), (1,)]
    assert sum(sharing.rates.values()) > 1.05
    assert "side by side" in sharing.reason
    assert "worker 0" in sharing.reason
    assert not sharing.widens
    assert not sharing.relocations


def test_sharing_that_disturbs_too_much_is_not_done() -> None:
    sharing = decide(disturbing(two(), 1.6))
    assert sharing.mode is Mode.HOLD
    assert sharing.widens == {"a", "b"}
    assert set(sharing.begin.values()) == {(0, 1)}
    assert sum(sharing.rates.values()) == pytest.approx(1.0)
    assert "times the work of taking turns" in sharing.reason
    assert decide(disturbing(two(), 1.02)).mode is Mode.SHARE


def test_without_idle_time_to_fill_pipelines_take_turns() -> None:
    # Equal lengths, and a step of all of them together saves nothing.
    flat = replace(table({1: (1e-6, 0.006, 1e-6), 2: (1e-6, 0.003, 5e-7)}), train_token_s=1e-3)
    state = cluster(2, *(pipeline(name, shape([200] * 64, score_s=0.0), table=flat) for name in "ab"))
    assert decide(state).mode is Mode.HOLD


def test_what_waits_for_scores_leaves_time_to_others() -> None:
    flat = replace(table({1: (1e-6, 0.006, 1e-6), 2: (1e-6, 0.003, 5e-7)}), train_token_s=1e-3)
    state = cluster(2, *(pipeline(name, shape([200] * 64, score_s=60.0), table=flat) for name in "ab"))
    assert decide(state).mode is Mode.SHARE


def test_alone_it_has_all_workers_and_widens() -> None:
    (a, b) = two(workers=4).pipelines
    sharing = decide(cluster(4, a))
    assert sharing.widens == {"a"}
    assert sharing.begin["a"] == (0, 1, 2, 3)
    assert "to itself" in sharing.reason
    done = decide(cluster(4, a, replace(b, steps_left=0)))
    assert done.widens == {"a"}
    assert decide(cluster(4, replace(a, may_widen=False))).widens == frozenset()
    assert decide(cluster(4)).begin == {}


def test_a_rollout_that_becomes_alone_spreads() -> None:
    a = two(workers=4).pipelines[0]
    rollout = replace(a, stage=Stage.ROLLOUT, live=live([1] * 24, [600] * 24), workers=(1,))
    (move,) = decide(cluster(4, rollout)).relocations
    assert (move.kind, move.to) == ("spread", (0, 1, 2, 3))
    assert move.gain_s > move.cost_s > 0
    short = replace(rollout, live=live([1] * 24, [2] * 24))
    assert not decide(cluster(4, short)).relocations


def test_priority_shifts_weights_and_progress() -> None:
    a, b = two(workers=1).pipelines
    equal = decide(cluster(1, a, b))
    first = decide(cluster(1, replace(a, priority=4.0), b))
    assert equal.weights == {"a": 1.0, "b": 1.0}
    if first.mode is Mode.SHARE:
        assert first.weights["a"] == 4.0 * first.weights["b"]
    look = Outlook(cluster(1, replace(a, priority=4.0), b), merges=True)
    here = (Begin(0, 1, True),) * 2
    even, uneven = (look.rates(Choice(here, (0, 0), w)) for w in ((1.0, 1.0), (4.0, 1.0)))
    assert uneven["a"] > 1.2 * even["a"]
    assert uneven["b"] < even["b"]


def test_a_step_is_not_slowed_beyond_its_limit() -> None:
    """More weight keeps it within the limit, or pipelines take turns; without a limit it would be slower."""
    a, b = two(workers=4, n=64).pipelines
    free = decide(cluster(4, a, b))
    assert free.mode is Mode.SHARE
    slow = 1.0 / min(free.rates.values())
    for limit in (1.02, 1.2, 1.5, 0.95 * slow):
        state = cluster(4, replace(a, max_slowdown=limit), b)
        sharing = decide(state)
        if sharing.mode is Mode.SHARE:
            assert sharing.weights["a"] >= 1.0
            assert sharing.rates["a"] >= 0.9 / limit
        else:
            assert "max_slowdown" in sharing.reason or "times the work" in sharing.reason
    assert decide(cluster(4, *(replace(p, max_slowdown=1.01) for p in (a, b)))).mode is Mode.HOLD


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(2, 4),
    st.sampled_from([1, 2, 3, 4, 8, 33]),
    st.sampled_from([1.0, 1.1, 1.4]),
    st.booleans(),
)
def test_it_is_never_worse_than_turns_by_its_own_model(
    seed: int, count: int, workers: int, factor: float, merge: bool
) -> None:
    state = random_state(seed, count, workers, factor)
    sharing = decide(state, merge=merge)
    assert set(sharing.begin) == {p.name for p in state.pipelines}
    assert all(on and max(on) < workers for on in sharing.begin.values())
    assert len(sharing.reason.splitlines()) == 1
    if sharing.mode is Mode.HOLD:
        assert not sharing.relocations
        return
    priorities = {p.name: p.priority for p in state.pipelines}
    assert sum(priorities[n] * r for n, r in sharing.rates.items()) > np.mean(list(priorities.values()))
    for move in sharing.relocations:
        (p,) = (p for p in state.pipelines if p.name == move.pipeline)
        holders = {w for w in p.live.worker.tolist() if w >= 0}
        assert move.kind in ("merge", "spread")
        assert (len(move.to) < len(holders)) == (move.kind == "merge")
        assert merge or move.kind == "spread"


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 3), st.sampled_from([2, 4]))
def test_equal_arguments_give_equal_decisions(seed: int, count: int, workers: int) -> None:
    state = random_state(seed, count, workers, 1.05)
    first = decide(state)
    assert decide(state) == first
    assert decide(random_state(seed, count, workers, 1.05)) == first


def test_a_tail_merges_while_others_have_work() -> None:
    a, b = two(workers=4, n=64).pipelines
    tail = replace(
        a, stage=Stage.ROLLOUT, live=live([0, 1, 2, 3], [500, 520, 540, 560]), workers=(0, 1, 2, 3), elapsed_s=20.0
    )
    busy = replace(b, stage=Stage.TRAIN, train_left=b.typical.train_tokens)
    sharing = decide(cluster(4, tail, busy))
    (move,) = sharing.relocations
    assert (move.pipeline, move.kind) == ("a", "merge")
    assert len(move.to) < 4
    assert move.gain_s > move.cost_s
    assert move.rest_s > 0
    assert "4 samples left" in move.reason
    assert not decide(cluster(4, tail, busy), merge=False).relocations
    assert not decide(cluster(4, replace(tail, merges_left=0), busy)).relocations
    # Alone there is nobody to make room for.
    assert not decide(cluster(4, tail)).relocations


def test_long_prefixes_are_not_moved_for_a_short_rest() -> None:
    dear = costs(move_byte_s=1e-5, prefill_s=8e-3)
    a, b = two(workers=4, n=64, table=dear).pipelines  # type: ignore[arg-type]
    tail = replace(
        a,
        stage=Stage.ROLLOUT,
        live=live([0, 1, 2, 3], [60] * 4, context=20_000),
        workers=(0, 1, 2, 3),
    )
    busy = replace(b, stage=Stage.TRAIN, train_left=b.typical.train_tokens)
    assert not decide(cluster(4, tail, busy)).relocations


def test_a_rollout_does_not_go_to_and_fro() -> None:
    """From its begin to its end, with a look after every few tokens and lengths that come out other than expected."""
    workers, n = 4, 48
    a, b = two(workers=workers, n=n).pipelines
    rng = np.random.default_rng(0)
    lengths = long_tailed(n, seed=9)
    where, done, merges_left = np.arange(n) % workers, 0, 2
    moves, before = [], None
    while (lengths > done).any():
        alive = np.flatnonzero(lengths > done)
        expected = np.maximum(1, ((lengths[alive] - done) * rng.uniform(0.6, 1.6, len(alive))).astype(np.int64))
        state = cluster(
            workers,
            replace(
                a,
                stage=Stage.ROLLOUT,
                live=live(where[alive].tolist(), expected.tolist(), context=50 + done),
                workers=tuple(sorted(set(where[alive].tolist()))),
                merges_left=merges_left,
                elapsed_s=0.1 * done,
            ),
            replace(b, stage=Stage.TRAIN, train_left=b.typical.train_tokens),
        )
        before = decide(state, before=before)
        for move in before.relocations:
            moves.append(move.kind)
            merges_left -= move.kind == "merge"
            where[alive] = np.array(move.to)[np.arange(len(alive)) % len(move.to)]
        done += 24
    assert len(moves) <= 2
    assert "spread" not in moves


def test_the_last_decision_is_kept_unless_another_is_better_by_a_margin() -> None:
    state = two(workers=4, n=48)
    first = decide(state)
    assert first.mode is Mode.SHARE
    swapped = replace(first, begin=dict(zip(first.begin, reversed(list(first.begin.values())), strict=True)))
    assert decide(state, before=swapped).begin == swapped.begin
    bad = replace(first, begin=dict.fromkeys(first.begin, (3,)))
    assert decide(state, before=bad).begin != bad.begin
    strange = replace(first, begin=dict.fromkeys(first.begin, (0, 2)))
    assert decide(state, before=strange).begin == first.begin


def test_holding_is_left_only_for_something_better_by_a_margin() -> None:
    """Between where sharing is as good as turns and where it is better by the margin, the last decision stays."""
    held, shared = None, None
    for factor in np.linspace(1.0, 1.4, 41).tolist():
        state = disturbing(two(), factor)
        fresh = decide(state)
        if fresh.mode is Mode.HOLD and held is None:
            held = factor
        kept = decide(state, before=decide(two()))
        if kept.mode is Mode.HOLD and shared is None:
            shared = factor
    assert held is not None
    assert shared is not None
    assert held < shared


def test_without_trust_or_time_or_by_policy_it_is_greedy() -> None:
    state = two(workers=4)
    expected = greedy.share(state)
    assert replace(decide(state, trust=False), reason="") == replace(expected, reason="")
    assert "wrong" in decide(state, trust=False).reason
    in_turns = decide(state, trust=False, before=Sharing(mode=Mode.HOLD, reason=""))
    assert in_turns.mode is Mode.HOLD  # nobody knows whether it would be better side by side
    assert in_turns.widens == {"a", "b"}
    assert "wrong" in in_turns.reason
    assert decide(state, corun="greedy") == expected
    ticks = iter(range(100_000))
    late = share(state, budget_s=0.5, clock=lambda: float(next(ticks)))
    assert replace(late, reason="") == replace(expected, reason="")
    assert "too long" in late.reason


def test_time_that_ends_during_the_search_still_gives_a_good_decision() -> None:
    state = two(workers=4, n=48)
    for calls in (2, 3, 5, 9, 17):
        ticks = iter([0.0] * calls + [100.0] * 100_000)
        sharing = share(state, budget_s=1.0, clock=lambda ticks=ticks: next(ticks))
        assert sharing.mode is Mode.SHARE
        assert sum(sharing.rates.values()) > 1.0


def test_greedy_merges_a_tail_only_while_others_have_work() -> None:
    a, b = two(workers=4).pipelines
    tail = replace(a, stage=Stage.ROLLOUT, live=live([0, 1, 2, 2], [50, 60, 70, 80]), workers=(0, 1, 2))
    busy = replace(b, stage=Stage.TRAIN, train_left=1000)
    sharing = greedy.share(cluster(4, tail, busy))
    (move,) = sharing.relocations
    assert move.to == (2,)
    assert sharing.mode is Mode.SHARE
    assert set(sharing.begin.values()) == {(0, 1, 2, 3)}
    assert not greedy.share(cluster(4, tail, busy), merge=False).relocations
    assert not greedy.share(cluster(4, tail, b)).relocations
    many = replace(tail, live=live([0, 1, 2] * 8, [50] * 24))
    assert not greedy.share(cluster(4, many, busy)).relocations


def test_a_new_pipeline_finds_room() -> None:
    a, b = two(workers=4, n=48).pipelines
    c = pipeline("c", shape(long_tailed(48, seed=3)))
    before = decide(cluster(4, a, b))
    sharing = decide(cluster(4, a, b, c), before=before)
    assert set(sharing.begin) == {"a", "b", "c"}


def random_state(seed: int, count: int, workers: int, factor: float) -> ClusterState:
    rng = np.random.default_rng(seed)
    pipelines = [random_pipeline(f"p{i}", rng, workers) for i in range(count)]
    return disturbing(cluster(workers, *pipelines), factor)


def random_pipeline(name: str, rng: np.random.Generator, workers: int) -> PipelineState:
    step = shape(long_tailed(int(rng.integers(2, 64)), seed=int(rng.integers(1 << 30))), group=2)
    stage = list(Stage)[int(rng.integers(len(Stage)))]
    rollout: Live = NOBODY
    if stage is Stage.ROLLOUT:
        n = int(rng.integers(1, 48))
        waiting = int(rng.integers(0, n)) if rng.random() < 0.3 else 0
        rollout = live(rng.integers(0, workers, n).tolist(), rng.integers(1, 900, n).tolist(), waiting=waiting)
    return pipeline(
        name,
        step,
        stage=stage,
        rollout=rollout,
        workers=tuple(sorted(set(rollout.worker.tolist()))) or range(workers),
        priority=float(rng.choice([0.5, 1.0, 3.0])),
        steps_left=int(rng.integers(1, 20)),
        elapsed_s=float(rng.uniform(0, 60)) if stage is not Stage.READY else 0.0,
        train_left=int(step.train_tokens * rng.random()) if stage is Stage.TRAIN else 0,
        table=costs(train_token_s=float(rng.choice([1e-4, 1e-3, 4e-3]))),
        stale_steps=int(rng.random() < 0.2),
    )
