"""Decode costs learnt from spans: the same as those that made them, and never absurd."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.core.events import Span
from longtail.costs.decode import DecodeCosts, DecodeFit

COSTS = DecodeCosts(base_s=0.01, per_sequence_s=0.002, per_prompt_token_s=1e-3)


def span(
    worker: int = 0, *, substage: str = "decode", busy_s: float, quanta: int, batch: float, tokens: int = 0
) -> Span:
    return Span(
        worker=worker, pipeline="p", substage=substage, step=0, start=0.0, end=1.0, busy_s=busy_s, quanta=quanta,
        tokens=tokens, batch=batch,
    )  # fmt: skip


def decode(batch: float, quanta: int = 50, worker: int = 0, costs: DecodeCosts = COSTS) -> Span:
    step_s = costs.base_s + costs.per_sequence_s * batch
    return span(worker, busy_s=quanta * step_s, quanta=quanta, batch=batch)


def test_steps_add_up_to_single_steps():
    costs = DecodeCosts(base_s=0.01, per_sequence_s=0.002, per_context_token_s=1e-5)
    one_by_one = sum(costs.step_s(3, 100 + 3 * i) for i in range(7))
    assert costs.steps_s(7, 3, 100) == pytest.approx(one_by_one)


def test_nothing_is_known_before_the_first_decode_step():
    fit = DecodeFit()
    fit.observe(span(substage="prefill", busy_s=1.0, quanta=1, batch=1, tokens=100))
    assert fit.costs(2) is None


def test_the_costs_behind_the_spans_are_found():
    fit = DecodeFit()
    for batch in (1, 4, 8, 16):
        fit.observe(decode(batch))
    fit.observe(span(substage="prefill", busy_s=0.5, quanta=3, batch=2, tokens=500))
    (found,) = fit.costs(1)
    assert found.base_s == pytest.approx(COSTS.base_s)
    assert found.per_sequence_s == pytest.approx(COSTS.per_sequence_s)
    assert found.per_prompt_token_s == pytest.approx(1e-3)


def test_a_worker_without_measurements_is_like_the_others():
    fit = DecodeFit()
    slow = DecodeCosts(base_s=0.03, per_sequence_s=0.006)
    for batch in (2, 8):
        fit.observe(decode(batch, worker=0))
        fit.observe(decode(batch, worker=1, costs=slow))
    own, other, unknown = fit.costs(3)
    assert own.step_s(4) == pytest.approx(COSTS.step_s(4))
    assert other.step_s(4) == pytest.approx(slow.step_s(4))
    assert own.step_s(4) < unknown.step_s(4) < other.step_s(4)


def test_a_machine_that_becomes_slower_is_noticed():
    fit = DecodeFit()
    slow = DecodeCosts(base_s=0.02, per_sequence_s=0.004)
    for costs in (COSTS, slow):
        for batch in [2, 8] * 200:
            fit.observe(decode(batch, costs=costs))
    (found,) = fit.costs(1)
    assert found.step_s(4) == pytest.approx(slow.step_s(4), rel=0.01)


@given(spans=st.lists(st.tuples(st.floats(1, 500), st.integers(1, 1000), st.floats(1e-6, 10)), min_size=1, max_size=20))
def test_whatever_the_spans_costs_are_not_negative_and_right_on_average(spans):
    fit = DecodeFit()
    for batch, quanta, step_s in spans:
        fit.observe(span(busy_s=quanta * step_s, quanta=quanta, batch=batch))
    (found,) = fit.costs(1)
    assert found.base_s >= 0
    assert found.per_sequence_s >= 0
    times = [step_s for _, _, step_s in spans]
    mean_batch = fit.costs(1) and sum(b for b, _, _ in spans) / len(spans)
    assert 0 < found.step_s(round(mean_batch)) < 1000 * max(times)


def test_what_was_learnt_survives_a_restart():
    fit, again = DecodeFit(), DecodeFit()
    for batch in (1, 4, 8):
        fit.observe(decode(batch))
        fit.observe(decode(batch, worker=1))
    again.load_state_dict(fit.state_dict())
    assert again.costs(2) == fit.costs(2)
