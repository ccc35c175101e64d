"""Figures of a ranking: tau-b against scipy, pairs by counting them, degenerate inputs, censoring, sources."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from longtail.lengths import evaluate as module
from longtail.lengths.data import LengthData
from longtail.lengths.evaluate import Evaluation, count_pairs, evaluate, evaluate_sources, verdict


def strict(evaluation: Evaluation) -> dict:
    return json.loads(json.dumps(evaluation.to_json(), allow_nan=False))


def noisy(n: int, seed: int = 0, noise: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Scores and heavy-tailed lengths that they partly explain."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=n)
    return scores, np.round(np.exp(4 + scores + noise * rng.normal(size=n)))


values = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.booleans()), min_size=2, max_size=25)


@settings(deadline=None)
@given(values)
def test_tau_is_scipys_tau_b_with_ties(rows):
    scores, lengths, _ = (np.array(column, float) for column in zip(*rows, strict=True))
    tau = evaluate(scores, lengths, bootstrap=0).tau
    expected = kendalltau(scores, lengths).statistic
    assert tau is None if np.isnan(expected) else tau == pytest.approx(expected, abs=1e-12)


def test_two_lengths_only_give_scipys_tau_b():
    rng = np.random.default_rng(1)
    lengths = np.where(rng.random(200) < 0.5, 16.0, 512.0)
    scores = lengths / 500 + rng.normal(size=200)
    assert evaluate(scores, lengths).tau == pytest.approx(kendalltau(scores, lengths).statistic, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "lengths", "reason"),
    [
        ([], [], "undefined: no rows"),
        ([1.0], [512.0], "undefined: one row"),
        (np.arange(200.0), [512.0] * 200, "undefined: all lengths equal"),
        ([0.0] * 200, np.arange(200.0), "undefined: all scores equal"),
        ([0.0] * 3, [5.0] * 3, "undefined: all lengths equal"),
    ],
)
def test_degenerate_input_is_null_with_a_reason_never_perfect(scores, lengths, reason):
    result = evaluate(np.array(scores), np.array(lengths), quantiles=np.full(len(lengths), 0.5))
    record = strict(result)
    assert (record["tau"], record["tau_low"], record["tau_high"]) == (None, None, None)
    assert record["reasons"]["tau"] == reason
    assert record["pair_accuracy"] in (None, 0.5)
    assert reason in verdict(result)


def test_two_rows_have_a_tau_but_no_interval():
    result = strict(evaluate(np.array([1.0, 2.0]), np.array([1.0, 2.0])))
    assert (result["tau"], result["tau_low"]) == (1.0, None)
    assert result["reasons"]["interval"] == "undefined: fewer than 10 rows"


def test_scores_that_are_not_finite_are_an_error():
    with pytest.raises(ValueError, match="1 scores and 0 lengths are not finite"):
        evaluate(np.array([1.0, np.nan]), np.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="2 lengths, but scores of shape"):
        evaluate(np.array([1.0]), np.array([1.0, 2.0]))


def test_the_interval_is_reproducible_covers_tau_and_narrows_with_more_rows():
    small, large = evaluate(*noisy(100)), evaluate(*noisy(2000))
    assert small == evaluate(*noisy(100))
    assert small.tau_low < small.tau < small.tau_high
    assert large.tau_high - large.tau_low < 0.5 * (small.tau_high - small.tau_low)
    assert evaluate(*noisy(100), seed=1).tau_low != small.tau_low


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    truth = evaluate(*noisy(20_000, seed=99), bootstrap=0).tau
    found = [evaluate(*noisy(150, seed=i), bootstrap=60) for i in range(40)]
    covered = np.mean([e.tau_low <= truth <= e.tau_high for e in found])
    assert 0.8 <= covered <= 1.0


def test_an_interval_from_smaller_resamples_is_scaled_to_the_same_width(monkeypatch):
    full = evaluate(*noisy(2000), bootstrap=300)
    monkeypatch.setattr(module, "RESAMPLE_MOST", 500)
    part = evaluate(*noisy(2000), bootstrap=300)
    assert part.tau_high - part.tau_low == pytest.approx(full.tau_high - full.tau_low, rel=0.25)
    assert "resamples of 500 rows, scaled to 2,000" in part.interval


# -- pairs ----------------------------------------------------------------------------------------------------------


def pairs_by_hand(scores, lengths, censored, delta):
    right, known, unknown = 0.0, 0, 0
    for i in range(len(lengths)):
        for j in range(len(lengths)):
            longer, shorter = lengths[i], lengths[j]
            if longer > shorter and longer - shorter >= delta * longer - 1e-9:
                if censored[j]:
                    unknown += 1
                    continue
                known += 1
                right += 1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0
    return right, known, unknown


@settings(deadline=None)
@given(values, st.sampled_from([0.0, 0.2, 0.3, 0.5, 1.0]))
def test_pairs_are_those_that_one_would_count_by_hand(rows, delta):
    scores, lengths, censored = (np.array(column) for column in zip(*rows, strict=True))
    pairs = count_pairs(scores, lengths.astype(float), censored, delta=delta, rng=np.random.default_rng(0))
    assert pairs[:3] == pairs_by_hand(scores, lengths, censored, delta)


def test_equal_scores_count_half_and_a_perfect_order_counts_one():
    lengths = np.array([1.0, 10.0, 100.0])
    assert evaluate(np.zeros(3), lengths).pair_accuracy == 0.5
    assert evaluate(lengths, lengths).pair_accuracy == 1.0
    assert evaluate(-lengths, lengths).pair_accuracy == 0.0


def test_pairs_whose_order_censoring_leaves_open_are_left_out_and_counted():
    lengths, censored = np.array([10.0, 50.0, 100.0]), np.array([False, True, True])
    result = evaluate(np.array([1.0, 3.0, 2.0]), lengths, censored=censored)
    assert (result.pairs, result.pairs_unknown, result.pair_accuracy, result.censored) == (2, 1, 1.0, 2)


def test_a_sample_of_the_pairs_agrees_with_all_of_them(monkeypatch):
    scores, lengths = noisy(1500)
    censored = lengths > np.quantile(lengths, 0.8)
    exact = evaluate(scores, lengths, censored=censored, bootstrap=0)
    monkeypatch.setattr(module, "EXACT_PAIRS", 1000)
    monkeypatch.setattr(module, "SAMPLED_PAIRS", 200_000)
    sampled = evaluate(scores, lengths, censored=censored, bootstrap=0)
    assert sampled.pairs_sampled
    assert sampled.pair_accuracy == pytest.approx(exact.pair_accuracy, abs=0.005)
    assert sampled.pairs_unknown / sampled.pairs == pytest.approx(exact.pairs_unknown / exact.pairs, rel=0.05)


# -- deciles and calibration ----------------------------------------------------------------------------------------


def test_deciles_count_every_row_once_and_a_perfect_ranker_fills_the_diagonal():
    scores, lengths = noisy(1000)
    counts = np.array(evaluate(scores, lengths, bootstrap=0).deciles)
    assert counts.shape == (10, 10)
    assert counts.sum() == 1000
    assert counts.sum(axis=1).tolist() == [100] * 10
    distinct = np.arange(1000.0)
    perfect = np.array(evaluate(distinct, distinct, bootstrap=0).deciles)
    assert np.diag(perfect).sum() == 1000


def test_calibration_is_perfect_for_true_quantiles_and_flat_for_chance():
    n = 1000
    lengths = np.arange(n, dtype=float)
    true = (lengths + 0.5) / n
    perfect = evaluate(lengths, lengths, quantiles=true, bootstrap=0).calibration
    assert perfect.mean_error < 1e-9
    assert perfect.uniform_error < 0.002
    shuffled = np.random.default_rng(0).permutation(true)
    chance = evaluate(shuffled, lengths, quantiles=shuffled, bootstrap=0).calibration
    assert chance.uniform_error < 0.002
    assert chance.mean_error == pytest.approx(0.25, abs=0.03)
    constant = evaluate(lengths, lengths, quantiles=np.full(n, 0.5), bootstrap=0).calibration
    assert constant.uniform_error == pytest.approx(0.5)
    assert [b.n for b in constant.bins] == [0] * 5 + [n] + [0] * 4
    assert constant.bins[0].predicted is None


# -- sources --------------------------------------------------------------------------------------------------------


def two_sources(n: int = 60) -> tuple[LengthData, np.ndarray]:
    """The second source is longer by a hundred times, and ranked backwards."""
    scores, lengths = noisy(2 * n, noise=0.2)
    sources = np.repeat([0, 1], n).astype(np.int32)
    scores[n:] = -scores[n:]
    lengths[n:] *= 100
    data = LengthData([str(i) for i in range(2 * n)], lengths, sources, ["a", "b"], "words", np.zeros(2 * n, bool))
    return data, scores


def test_rows_of_different_sources_are_never_compared():
    data, scores = two_sources()
    overall, by_source = evaluate_sources(data, scores)
    assert by_source["a"].tau > 0.7
    assert by_source["b"].tau < -0.7
    assert abs(overall.tau) < 0.1
    assert overall.pairs == by_source["a"].pairs + by_source["b"].pairs
    moved = replace(data, lengths=np.where(data.sources == 1, data.lengths * 1000, data.lengths))
    assert evaluate_sources(moved, scores)[0].tau == pytest.approx(overall.tau)


def test_one_source_is_the_whole_and_a_source_without_rows_has_no_figures():
    data, scores = two_sources()
    first = data.take(data.sources == 0)
    overall, by_source = evaluate_sources(first, scores[:60])
    assert by_source == {"a": overall}


def test_sources_that_can_each_not_be_ranked_are_undefined_together():
    data, _ = two_sources(2)
    data = replace(data, lengths=np.array([1.0, 1.0, 2.0, 3.0]))
    overall, by_source = evaluate_sources(data, np.array([1.0, 2.0, 5.0, 5.0]))
    assert (overall.tau, by_source["a"].tau, by_source["b"].tau) == (None, None, None)
    assert overall.reasons["tau"] == "undefined: no source has both different scores and different lengths"
    assert strict(overall)["n"] == 4


def test_a_source_without_an_order_is_left_out_but_a_collapsed_ranker_is_not():
    scores, lengths = noisy(60, noise=0.3)
    sources = np.repeat([0, 1], 30)
    alone = evaluate(scores[:30], lengths[:30], bootstrap=0).tau
    equal_lengths = np.where(sources == 1, 7.0, lengths)
    assert evaluate(scores, equal_lengths, sources=sources, bootstrap=0).tau == pytest.approx(alone)
    equal_scores = np.where(sources == 1, 0.0, scores)
    assert evaluate(equal_scores, lengths, sources=sources, bootstrap=0).tau < 0.8 * alone


# -- the sentence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tau", "low", "high", "words"),
    [
        (0.03, 0.0, 0.08, "hardly predict lengths here"),
        (-0.3, -0.4, -0.2, "run against the lengths"),
        (0.2, 0.15, 0.25, "say something about lengths"),
        (0.4, 0.35, 0.45, "well enough here for ordering to pay wherever requests wait in a queue"),
        (0.6, 0.55, 0.65, "predict lengths strongly"),
        (0.4, 0.25, 0.55, "not certain: tau may lie anywhere from 0.25 to 0.55"),
    ],
)
def test_the_sentence_says_which_case_it_is(tau, low, high, words):
    assert words in verdict(Evaluation(n=100, censored=0, delta=0.2, tau=tau, tau_low=low, tau_high=high))


def test_the_sentence_mentions_many_cut_off_answers():
    assert "30% of the answers were cut off" in verdict(Evaluation(n=100, censored=30, delta=0.2, tau=0.4))
