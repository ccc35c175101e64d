import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import CensoredData, ecdf

from longtail.lengths.survival import EXACT, Curve, LengthCounts, LengthGrid, product_limit, scale_free_hazard

CAP = 60

responses = st.lists(st.tuples(st.integers(0, CAP), st.booleans()), min_size=1, max_size=40)
weighted = st.lists(
    st.tuples(st.integers(0, 3000), st.booleans(), st.sampled_from([1.0, 0.9, 0.81, 0.25])), min_size=1, max_size=40
)


def slow_product_limit(times, censored, weights, at):
    """Kaplan and Meier, one response at a time."""
    survival = 1.0
    for t in sorted({t for t, cut in zip(times, censored, strict=True) if not cut and t <= at}):
        ended = sum(w for s, cut, w in zip(times, censored, weights, strict=True) if s == t and not cut)
        survival *= 1.0 - ended / sum(w for s, w in zip(times, weights, strict=True) if s >= t)
    return survival


def counts_of(lengths, censored, *, cap=CAP, prior_weight=1.0) -> LengthCounts:
    counts = LengthCounts(LengthGrid(cap), prior_weight=prior_weight)
    counts.add(np.array(lengths, dtype=np.int64), np.array(censored, dtype=bool))
    return counts


@given(responses)
def test_the_product_limit_is_scipys(rows):
    lengths, censored = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    counts, grid = counts_of(lengths, censored), LengthGrid(CAP)
    ours = product_limit(counts.ended_J, counts.censored_J, np.zeros(len(grid)), 0.0)
    theirs = ecdf(CensoredData(uncensored=lengths[~censored], right=lengths[censored])).sf
    np.testing.assert_allclose(ours, theirs.evaluate(grid.edges), atol=1e-12)


@given(weighted)
def test_the_product_limit_of_decayed_counts_is_the_slow_one(rows):
    grid = LengthGrid(3000)
    ended, censored = np.zeros(len(grid)), np.zeros(len(grid))
    for length, cut, weight in rows:
        (censored if cut else ended)[grid.bin_of[length]] += weight
    ours = product_limit(ended, censored, np.zeros(len(grid)), 0.0)
    bins, cuts, weights = [int(grid.bin_of[r[0]]) for r in rows], [r[1] for r in rows], [r[2] for r in rows]
    for j in {*bins, 0, len(grid) - 1}:
        assert ours[j] == pytest.approx(slow_product_limit(bins, cuts, weights, j), abs=1e-12)


@given(responses)
def test_spreading_changes_nothing_where_responses_ended(rows):
    counts = counts_of([r[0] for r in rows], [r[1] for r in rows])
    grid = counts.grid
    limit = product_limit(counts.ended_J, counts.censored_J, scale_free_hazard(grid), 1.0)
    observed = np.flatnonzero(counts.ended_J)
    np.testing.assert_allclose(counts.curve().survival_J[observed], limit[observed], atol=1e-12)


@given(responses, st.lists(st.integers(0, CAP), max_size=20))
def test_a_curve_falls_from_one_and_stays_a_probability(rows, alive):
    survival = counts_of([r[0] for r in rows], [r[1] for r in rows]).curve(np.array(alive, np.int64)).survival_J
    steps = np.diff(np.append(1.0, survival))
    assert (steps <= 1e-12).all()
    assert (survival >= -1e-12).all()


@given(responses, st.lists(st.integers(0, CAP), min_size=1, max_size=20))
def test_a_live_sequence_counts_as_cut_off_where_it_is(rows, alive):
    counts = counts_of([r[0] for r in rows], [r[1] for r in rows])
    now = counts.curve(np.array(alive, np.int64)).survival_J
    counts.add(np.array(alive, np.int64), np.ones(len(alive), bool))
    np.testing.assert_array_equal(now, counts.curve().survival_J)


def test_leaving_out_the_live_would_make_a_batch_look_short():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 501, 4000)
    done = lengths <= 250
    counts = counts_of(lengths[done], np.zeros(done.sum(), bool), cap=600)
    curve = counts.curve(np.full((~done).sum(), 250))
    assert curve.survival(np.array([125]))[0] == pytest.approx(0.75, abs=0.02)
    assert counts.curve().survival(np.array([125]))[0] == pytest.approx(0.5, abs=0.02)


@given(responses)
def test_quantiles_are_the_smallest_length_that_reaches_p(rows):
    curve = counts_of([r[0] for r in rows], [r[1] for r in rows]).curve()
    lengths = np.arange(CAP + 1)
    cdf = 1.0 - curve.survival(lengths)
    for p in (0.01, 0.25, 0.5, 0.9, 0.99):
        t = int(curve.quantile(np.array(p)))
        assert cdf[t] >= p - 1e-9
        assert t == 0 or cdf[t - 1] < p + 1e-9


@given(responses)
def test_the_area_is_the_expected_number_of_further_tokens(rows):
    curve = counts_of([r[0] for r in rows], [r[1] for r in rows]).curve()
    survival = curve.survival(np.arange(CAP + 1))
    np.testing.assert_allclose(curve.area, [survival[t:].sum() for t in curve.grid.edges], atol=1e-9)


def test_the_area_is_right_in_wide_bins_too():
    curve = counts_of([700, 5000, 9000, 20000], [False, False, True, False], cap=30000).curve()
    survival = curve.survival(np.arange(30001))
    for j in (0, 100, 600, len(curve.grid) - 2):
        assert curve.area[j] == pytest.approx(survival[curve.grid.edges[j] :].sum(), rel=1e-6)


def test_before_any_response_half_pass_the_square_root_of_the_cap_and_a_quarter_reach_it():
    curve = LengthCounts(LengthGrid(10_000)).curve()
    survival = curve.survival(np.array([-1, 0, 99, 9_999, 10_000]))
    assert survival.tolist() == pytest.approx([1.0, 1.0, 0.5, 0.25, 0.0], abs=0.01)


@pytest.mark.parametrize("beyond", [1, 3, 9])
def test_lengths_beyond_an_age_leave_one_more_chance_for_a_longer_one(beyond):
    """Of k + 1 exchangeable lengths beyond an age, each is the longest with probability 1 / (k + 1)."""
    lengths = [10] * 50 + [200 + 7 * i for i in range(beyond)]
    curve = counts_of(lengths, [False] * len(lengths), cap=100_000).curve()
    at, longest = curve.survival(np.array([10, max(lengths)]))
    assert longest / at == pytest.approx(1 / (beyond + 1), rel=0.25)


def test_a_length_between_two_seen_ones_is_possible_and_an_atom_stays_one():
    between = counts_of([100, 300], [False, False], cap=500).curve().survival(np.array([150, 200, 250]))
    assert (np.diff(between) < -0.05).all()
    atom = counts_of([100] * 500 + [300] * 500, [False] * 1000, cap=500).curve().survival(np.array([110, 200, 290]))
    assert np.ptp(atom) < 0.01
    assert atom[0] == pytest.approx(0.5, abs=0.01)


def test_what_was_cut_off_at_the_cap_stays_beyond_it():
    curve = counts_of([30] * 60 + [CAP] * 40, [False] * 60 + [True] * 40).curve()
    assert curve.survival_J[-1] == pytest.approx(0.4, abs=0.02)
    assert curve.survival(np.array([CAP]))[0] == 0.0
    assert curve.quantile(np.array([0.5, 0.7, 0.99])).tolist() == [30, CAP, CAP]


@pytest.mark.parametrize(
    ("lengths", "censored"),
    [([7] * 100, False), ([CAP] * 100, True), ([7] * 100, True), ([0] * 100, False), ([1, 60], False), ([], False)],
)
def test_degenerate_lengths_give_a_proper_curve(lengths, censored):
    curve = counts_of(lengths, [censored] * len(lengths)).curve()
    assert np.isfinite(curve.survival_J).all()
    assert np.isfinite(curve.area).all()
    assert ((curve.quantile(np.array([0.1, 0.9])) >= 0) & (curve.quantile(np.array([0.1, 0.9])) <= CAP)).all()


def test_with_a_cap_of_one_there_is_one_length():
    curve = counts_of([1, 1, 1], [False, True, False], cap=1).curve()
    assert curve.quantile(np.array([0.1, 0.9])).tolist() == [1, 1]
    assert curve.area.tolist() == pytest.approx([1.0, 0.0], abs=0.01)


def test_old_lengths_weigh_less_and_less():
    counts = counts_of([50] * 100, [False] * 100)
    for _ in range(20):
        counts.age(0.8)
        counts.add(np.full(100, 10), np.zeros(100, bool))
    assert counts.curve().survival(np.array([20]))[0] < 0.02


@pytest.mark.parametrize("cap", [1, 2, 511, 512, 513, 5000, 131072])
def test_bins_cover_every_length_once_and_are_narrow(cap):
    grid = LengthGrid(cap)
    assert grid.edges[0] == 0
    assert grid.edges[-1] == cap
    assert (np.diff(grid.edges) > 0).all()
    lengths = np.arange(cap + 1)
    assert (grid.edges[grid.bin_of] >= lengths).all()
    assert (np.diff(grid.edges) <= np.maximum(1, grid.edges[1:] / EXACT + 1)).all()
    assert (grid.edges[: min(cap, EXACT) + 1] == lengths[: EXACT + 1]).all()


def test_a_higher_cap_keeps_the_bins_below():
    low, high = LengthGrid(3000), LengthGrid(9000)
    assert (low.edges[:-1] == high.edges[: len(low) - 1]).all()


def test_values_at_edges_are_interpolated_in_between():
    grid = LengthGrid(4000)
    np.testing.assert_allclose(grid.at(grid.edges.astype(float), np.arange(4001)), np.arange(4001), rtol=1e-5)


def test_counts_move_to_another_cap():
    lengths, censored = [40, 90, 150, 200, 200], [False, False, False, True, False]
    counts = counts_of(lengths, censored, cap=200)
    higher = counts.moved_to(LengthGrid(1000))
    assert higher.curve().survival(np.array([199]))[0] > 0.2
    lower = counts.moved_to(LengthGrid(100))
    assert lower.ended_J.sum() == 2.0
    assert lower.censored_J[-1] == 3.0
    again = counts.moved_to(LengthGrid(200))
    np.testing.assert_array_equal(again.ended_J, counts.ended_J)
    np.testing.assert_array_equal(again.censored_J, counts.censored_J)


def test_an_empty_step_changes_nothing():
    counts = counts_of([3, 9], [False, True])
    before = counts.curve().survival_J
    counts.add(np.zeros(0, np.int64), np.zeros(0, bool))
    np.testing.assert_array_equal(before, counts.curve().survival_J)
    assert isinstance(counts.curve(np.zeros(0, np.int64)), Curve)
