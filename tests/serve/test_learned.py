"""What served requests teach: expected lengths, drift, speed, backlog."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.serve.learned import BINS, KEPT, PRIOR_TOKENS, RANKED, Served


def taught(pairs, cut=False) -> Served:
    served = Served()
    for quantile, tokens in pairs:
        served.observe(quantile, tokens, cut)
    return served


def test_before_anything_is_known_the_prior_is_expected():
    served = Served()
    for quantile in (None, 0.0, 0.5, 1.0):
        assert served.expected_tokens(quantile, None) == pytest.approx(PRIOR_TOKENS)
        assert served.expected_tokens(quantile, 10) == 10


def test_expected_lengths_follow_what_was_served():
    rng = np.random.default_rng(0)
    quantiles = rng.random(KEPT)
    served = taught((q, rng.exponential(20 + 1000 * q)) for q in quantiles)
    for quantile in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert served.expected_tokens(quantile, None) == pytest.approx(20 + 1000 * quantile, rel=0.25)
    assert served.expected_tokens(None, None) == pytest.approx(520, rel=0.1)
    assert served.expected_tokens(0.9, 300) == 300


def test_one_odd_answer_does_not_make_a_bin():
    served = taught([(0.05, 100.0)] * 500 + [(0.95, 100_000.0)])
    assert 100 < served.expected_tokens(0.95, None) < 15_000
    assert served.expected_tokens(0.05, None) < 200


def test_answers_without_a_quantile_count_for_the_mean():
    served = taught([(None, 1000.0)] * 100)
    assert served.expected_tokens(None, None) == pytest.approx(1000, rel=0.05)
    assert served.expected_tokens(0.3, None) == pytest.approx(served.expected_tokens(None, None))


def test_old_answers_are_forgotten():
    served = taught([(0.5, 10_000.0)] * KEPT + [(0.5, 10.0)] * KEPT)
    assert served.expected_tokens(0.5, None) == pytest.approx(10, rel=0.1)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.floats(0, 1e6)), max_size=60),
    st.one_of(st.none(), st.floats(0, 1)),
    st.one_of(st.none(), st.integers(1, 10_000)),
)
def test_expected_lengths_lie_between_what_was_seen_and_the_prior(pairs, quantile, max_tokens):
    lengths = [tokens for _, tokens in pairs] + [PRIOR_TOKENS]
    expected = taught(pairs).expected_tokens(quantile, max_tokens)
    most = max(lengths) if max_tokens is None else min(max(lengths), max_tokens)
    least = min(lengths) if max_tokens is None else min(min(lengths), max_tokens)
    assert least * (1 - 1e-9) - 1e-6 <= expected <= most * (1 + 1e-9) + 1e-6


def test_expected_lengths_have_no_steps():
    served = taught([(q, 1000 * q) for q in np.linspace(0, 1, 1000)])
    curve = [served.expected_tokens(q, None) for q in np.linspace(0, 1, 501)]
    assert max(np.abs(np.diff(curve))) < 2 * 1000 / 500
    assert curve == sorted(curve)
    assert len(set(curve)) > 30 * BINS


def test_the_share_of_cut_answers_is_known():
    served = Served()
    assert served.cut_share() is None
    for i in range(10):
        served.observe(0.5, 10, cut=i < 3)
    assert served.cut_share() == pytest.approx(0.3)


def test_tau_says_why_it_is_not_known():
    served = taught([(0.1, 5.0)] * 49)
    assert served.tau() is None
    assert served.tau_reason == "49 ranked answers are known, 50 are needed"
    served.observe(0.1, 7.0, cut=False)
    assert served.tau() is None
    assert served.tau_reason == "all quantiles are equal"
    served = taught([(i / 60, 5.0) for i in range(60)])
    assert served.tau() is None
    assert served.tau_reason == "all lengths are equal"
    served.observe(0.99, 6.0, cut=False)
    assert served.tau() is not None
    assert served.tau_reason is None


def test_tau_is_of_the_last_five_hundred_ranked_answers():
    served = taught([(i / 1000, -i) for i in range(1000)])
    assert served.tau() == pytest.approx(-1)
    for i in range(RANKED):
        served.observe(i / RANKED, i, cut=False)
        served.observe(None, -i, cut=False)
    assert served.tau() == pytest.approx(1)


def test_tau_is_computed_anew_after_twenty_ranked_answers():
    served = taught([(i / 100, i) for i in range(100)])
    assert served.tau() == pytest.approx(1)
    for i in range(19):
        served.observe(1.0, 0.0, cut=False)
        served.observe(None, float(i), cut=False)
    assert served.tau() == pytest.approx(1)
    served.observe(1.0, 0.0, cut=False)
    assert served.tau() < 0.9


def test_speed_is_that_of_busy_times():
    served = Served()
    assert served.tokens_per_s is None
    served.tick(0.0, 0, in_flight=0)
    served.tick(10.0, 0, in_flight=4)  # idle until now
    assert served.tokens_per_s is None
    served.tick(11.0, 100, in_flight=4)
    assert served.tokens_per_s == pytest.approx(100)
    served.tick(12.0, 200, in_flight=0)  # the last ones ended somewhere in here
    served.tick(1000.0, 200, in_flight=0)
    served.tick(1001.0, 200, in_flight=3)
    assert served.tokens_per_s == pytest.approx(100)


def test_speed_follows_a_change_within_minutes_however_often_it_is_looked_at():
    for every_s in (0.5, 1.0, 5.0):
        served, now_s, total = Served(), 0.0, 0.0
        for speed in (50.0, 200.0):
            for _ in range(round(120 / every_s)):
                served.tick(now_s, total, in_flight=1)
                now_s, total = now_s + every_s, total + speed * every_s
            assert served.tokens_per_s == pytest.approx(speed, rel=0.03)


def test_odd_ticks_do_not_spoil_the_speed():
    served = Served()
    served.tick(0.0, 1000, in_flight=1)
    served.tick(1.0, 1100, in_flight=1)
    served.tick(1.0, 1150, in_flight=1)  # no time has passed
    served.tick(0.5, 1150, in_flight=1)
    served.tick(2.0, 1200, in_flight=1)
    assert served.tokens_per_s == pytest.approx(100)
    served.tick(3.0, 900, in_flight=1)  # an estimate was corrected
    assert served.tokens_per_s == pytest.approx(100)
    served.tick(4.0, 1000, in_flight=1)
    assert served.tokens_per_s == pytest.approx(100)
