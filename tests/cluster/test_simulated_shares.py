"""Simulated workers share their time by weight, as real ones do when seen over many quanta."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine_models import prompt_of, request
from longtail.cluster.messages import Alive, Shares
from longtail.core.types import SubStage
from longtail.costs.decode import DecodeCosts
from longtail.costs.worker import WorkerCosts
from simulated_driven import Driven, config
from simulated_run import pipeline, simulate

STEP_S = 0.001
DECODE = DecodeCosts(base_s=STEP_S, per_sequence_s=0.0)
COSTS = WorkerCosts(decode=DECODE, per_train_token_s=1e-4, update_s=0.1, load_s=0.0)


def rollouts(lengths: dict[str, int], weights: dict[str, float] | None = None) -> Driven:
    """One worker, and in each pipeline a sequence that takes so many steps of a millisecond."""
    driven = Driven(1, pipelines={name: config() for name in lengths}, costs=COSTS)
    driven.send([0], Shares(weights=tuple((weights or {}).items())))
    for name, length in lengths.items():
        driven.generate(0, request(name, prompt_of(1), forced=(length + 1,), max_tokens=10**6), name=name)
    return driven


def ends(driven: Driven) -> dict[str, float]:
    return {name: end for (name, _), end in driven.ends().items()}


def fluid(work_s: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    """When each is done, if all that are not share the worker by weight."""
    left, now, done = dict(work_s), 0.0, {}
    while left:
        together = sum(weights[name] for name in left)
        step = min(seconds * together / weights[name] for name, seconds in left.items())
        now += step
        left = {name: seconds - step * weights[name] / together for name, seconds in left.items()}
        done |= {name: now for name, seconds in left.items() if seconds <= 1e-9}
        left = {name: seconds for name, seconds in left.items() if name not in done}
    return done


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3000), min_size=1),
    weights=st.fixed_dictionaries({name: st.floats(0.01, 100.0) for name in "abcd"}),
)
def test_pieces_progress_in_proportion_to_weights_and_the_worker_is_never_idle(lengths, weights):
    driven = rollouts(lengths, weights)
    driven.run()
    expected = fluid({name: length * STEP_S for name, length in lengths.items()}, weights)
    assert ends(driven) == pytest.approx(expected, abs=1e-3)
    assert max(ends(driven).values()) == pytest.approx(sum(lengths.values()) * STEP_S)


def test_weights_may_change_in_the_middle_and_hold_for_pipelines_that_come_later():
    driven = rollouts({"a": 1000, "b": 1000})
    driven.until(0.4)  # 0.2 s each
    driven.send([0], Shares(weights=(("a", 3.0), ("c", 4.0))))
    driven.until(0.8)  # 0.3 s and 0.1 s
    driven.pipelines["c"] = config()
    driven.attempts["c"] = 0
    driven.open("c")
    driven.generate(0, request("c", prompt_of(1), forced=(201,), max_tokens=999), name="c")
    driven.run()
    # From 0.8 on 3 : 1 : 4; c needs 0.2 s, so it is done at 1.2, when a has had 0.65 s and b 0.35 s.
    found = ends(driven)
    assert found["c"] == pytest.approx(1.2, abs=0.01)
    assert found["a"] == pytest.approx(1.2 + 0.35 / 0.75, abs=0.01)
    assert found["b"] == pytest.approx(2.2, abs=1e-6)


def test_progress_is_told_by_share():
    driven = Driven(2, pipelines={name: config() for name in "ab"}, costs=COSTS)
    for name in "ab":
        driven.generate(0, request(name, prompt_of(1), forced=(2001,), max_tokens=9999), name=name)
    driven.send([0], Shares(weights=(("a", 9.0),)))
    driven.until(1.0)
    last = {report.pipeline: int(report.generated[0][0]) for report in driven.all(Alive)}
    assert last["a"] / last["b"] == pytest.approx(9.0, rel=0.1)


def test_a_pipeline_alone_takes_as_long_whatever_its_weight():
    driven = rollouts({"a": 500}, {"a": 0.001})
    driven.run()
    assert ends(driven)["a"] == pytest.approx(0.5)
    driven.stop()
    assert sum(span.busy_s for span in driven.spans(0, SubStage.DECODE, "a")) == pytest.approx(0.5)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pipeline_of_priority_4_is_over_long_before_an_equal_one_of_priority_1(tmp_path, workers):
    jobs = {"much": pipeline(priority=4.0, steps=6), "little": pipeline(priority=1.0, steps=6)}
    done = simulate(jobs, [[40] * 8] * 12, tmp_path, workers=workers)
    start = min(event.t for event in done.record.events)
    over = {e.pipeline: e.t - start for e in done.record.events if e.kind == "pipeline_ended"}
    assert over["much"] < 0.8 * over["little"]
