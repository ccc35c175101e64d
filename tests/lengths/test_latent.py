"""The latent model against quadrature, against closed forms, and against data simulated from it."""

import numpy as np
import pytest
from scipy.stats import norm

from longtail.lengths.history import Recalled
from longtail.lengths.latent import Evidence, Params, Prior, posterior, prior
from longtail.lengths.learning import Folded, Learner

NO_HISTORY = Recalled(np.zeros(1), np.zeros(1))


def params(**changes) -> Params:
    return Params(**{"rho": 0.0, "within": 0.4, "tilt": 0.0, "outlier": 1e-20, "drift": 0.0, **changes})


def cavities(alive, ended, p: Params, known: Prior | None = None):
    """One group: ``alive`` samples have passed those scores, ``ended`` ones ended there."""
    rows = Evidence(np.array([*alive, *ended], np.float32), np.zeros(len(alive) + len(ended), np.int64), len(alive))
    return posterior(known or prior(np.array([np.nan]), NO_HISTORY, p), rows, p)


def quadrature(alive, ended, p: Params, leave_out: int) -> tuple[float, float]:
    """Mean and standard deviation of the left-out row's z given all others."""
    m = np.linspace(-7, 7, 5001)
    log_w = norm.logpdf(m, 0, np.sqrt(1 - p.within))
    for i, a in enumerate(alive):
        log_w += 0.0 if i == leave_out else norm.logsf((a - m) / np.sqrt(p.within))
    for i, z in enumerate(ended):
        log_w += 0.0 if i + len(alive) == leave_out else norm.logpdf(z, m, np.sqrt(p.within))
    w = np.exp(log_w - log_w.max())
    w /= w.sum()
    mean = float((w * m).sum())
    return mean, float(np.sqrt((w * (m - mean) ** 2).sum() + p.within))


def test_with_all_mates_ended_the_posterior_is_the_conjugate_one():
    p, ended = params(within=0.3), [-0.4, 0.1, 0.5, 1.1]
    found = cavities([], ended, p)
    for i in range(len(ended)):
        others = np.delete(ended, i)
        precision = 1 / 0.7 + len(others) / 0.3
        assert found.mean[i] == pytest.approx(others.sum() / 0.3 / precision, abs=1e-4)
        assert found.sd[i] == pytest.approx(np.sqrt(1 / precision + 0.3), abs=1e-4)


@pytest.mark.parametrize(
    ("alive", "ended"),
    [([0.2], [0.0, 0.1, -0.8]), ([0.4] * 4, [-1.0, -0.2, 0.0, 0.3]), ([1.0, 1.0], [-0.5]), ([0.7] * 7, [0.6])],
)
@pytest.mark.parametrize("within", [0.25, 0.6])
def test_live_mates_count_as_beyond_where_they_are_as_quadrature_has_it(alive, ended, within):
    p = params(within=within)
    found = cavities(alive, ended, p)
    for i in range(len(alive)):
        mean, sd = quadrature(alive, ended, p, leave_out=i)
        assert found.mean[i] == pytest.approx(mean, abs=0.08)
        assert found.sd[i] == pytest.approx(sd, rel=0.06)


def test_a_group_that_has_generated_nothing_says_nothing():
    found = cavities([-6.0] * 16, [], params())
    np.testing.assert_allclose(found.mean, 0.0, atol=1e-3)
    np.testing.assert_allclose(found.sd, 1.0, atol=1e-3)


def test_a_row_is_not_evidence_about_itself():
    alone = cavities([2.0], [], params())
    assert alone.mean[0] == pytest.approx(0.0, abs=1e-6)
    assert alone.sd[0] == pytest.approx(1.0, abs=1e-6)


def test_a_mate_says_more_the_longer_it_lives():
    means = [float(cavities([-6.0, score], [], params()).mean[0]) for score in (-6.0, -1.0, 0.0, 1.0, 2.0)]
    assert (np.diff(means) > 0).all()


def test_an_outlier_hardly_moves_its_mates():
    # Ten mates agree; one ran away. Taken at its word it would raise the mean by a fifth of a unit.
    ended = [-1.0, -1.1, -0.9, -1.0, -1.2, -0.8, -1.0, -1.05, -0.95, -1.0, 1.2]
    taken = cavities([], ended, params(within=0.1)).mean[0]
    found = cavities([], ended, params(within=0.1, outlier=0.05))
    assert found.keep[-1] < 0.05
    assert (found.keep[:-1] > 0.9).all()
    assert found.mean[0] < taken - 0.15


def test_history_counts_like_mates_but_fades_with_drift():
    recalled = Recalled(np.array([8.0]), np.array([1.0]))
    steady = prior(np.array([np.nan]), recalled, params())
    assert steady.precision[0] == pytest.approx(1 / 0.6 + 8 / 0.4)
    drifting = prior(np.array([np.nan]), recalled, params(drift=0.4))
    # Eight responses of variance 0.4 / 8, on top of a drift of 0.4.
    assert drifting.precision[0] == pytest.approx(1 / 0.6 + 1 / (0.4 / 8 + 0.4))


def test_prompts_of_long_answers_vary_more_where_the_tilt_says_so():
    low = cavities([-6.0], [-1.0] * 6, params(tilt=0.3))
    high = cavities([-6.0], [1.0] * 6, params(tilt=0.3))
    assert high.sd[0] > 1.1 * low.sd[0]


def simulate(rng, *, prompts, samples, rho, within, outlier=0.0, means=None):
    u = rng.standard_normal(prompts)
    if means is None:
        means = rho * u + np.sqrt(1 - rho**2 - within) * rng.standard_normal(prompts)
    group = np.repeat(np.arange(prompts), samples)
    z = means[group] + np.sqrt(within) * rng.standard_normal(len(group))
    stray = rng.random(len(group)) < outlier
    return u, means, group, np.where(stray, rng.standard_normal(len(group)), z).astype(np.float32)


def as_rows(z, group, cap) -> Evidence:
    cut = z > cap
    score = np.concatenate([np.full(cut.sum(), cap), z[~cut]]).astype(np.float32)
    return Evidence(score, np.concatenate([group[cut], group[~cut]]), int(cut.sum()))


@pytest.mark.parametrize("cap", [9.0, 0.5])
@pytest.mark.parametrize(("rho", "within"), [(0.5, 0.3), (0.0, 0.7)])
def test_parameters_are_found_even_where_a_third_is_cut_off(cap, rho, within):
    rng = np.random.default_rng(0)
    learner = Learner(rho=0.2)
    for _ in range(10):
        u, _, group, z = simulate(rng, prompts=150, samples=8, rho=rho, within=within)
        nothing = np.zeros(150)
        learner.learn(Folded(u, Recalled(nothing, nothing), as_rows(z, group, cap)))
        learner.age(0.9)
    assert learner.params.rho == pytest.approx(rho, abs=0.06)
    assert learner.params.within == pytest.approx(within, abs=0.08)


def test_outliers_are_counted():
    rng = np.random.default_rng(1)
    learner = Learner(rho=0.0)
    for _ in range(10):
        u, _, group, z = simulate(rng, prompts=150, samples=8, rho=0.0, within=0.1, outlier=0.15)
        nothing = np.zeros(150)
        learner.learn(Folded(u * np.nan, Recalled(nothing, nothing), as_rows(z, group, 9.0)))
    assert learner.params.outlier == pytest.approx(0.15, abs=0.05)
    assert learner.params.within == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_drift_between_visits_is_found(drift):
    rng = np.random.default_rng(2)
    learner = Learner(rho=0.0)
    for _ in range(10):
        u, means, _, _ = simulate(rng, prompts=150, samples=1, rho=0.0, within=0.3)
        average = means + np.sqrt(0.3 / 8) * rng.standard_normal(150)
        now = means + np.sqrt(drift) * rng.standard_normal(150)
        _, _, group, z = simulate(rng, prompts=150, samples=8, rho=0.0, within=0.3, means=now)
        learner.learn(Folded(u * np.nan, Recalled(np.full(150, 8.0), average), as_rows(z, group, 9.0)))
    assert learner.params.drift == pytest.approx(drift, abs=0.06)


def test_single_samples_leave_the_split_where_it_was():
    rng = np.random.default_rng(3)
    learner = Learner(rho=0.0)
    before = learner.params
    u, _, group, z = simulate(rng, prompts=500, samples=1, rho=0.0, within=0.3)
    nothing = np.zeros(500)
    learner.learn(Folded(u * np.nan, Recalled(nothing, nothing), as_rows(z, group, 1.0)))
    assert learner.params == before


def test_a_prompt_unlike_all_before_is_not_believed_without_bound():
    learner = Learner(rho=0.5)
    learner.saw(np.full(10_000, 0.7))
    assert np.abs(learner.standardised(np.array([0.7, 3.0, -3.0]))).max() <= 3.0
