import numpy as np
import pytest

from longtail.lengths.remaining import BeliefError, Remaining
from longtail.lengths.scores import Scores
from longtail.lengths.survival import LengthCounts, LengthGrid

CAP = 2000


def scores(seed: int = 0, lengths: np.ndarray | None = None) -> Scores:
    counts = LengthCounts(LengthGrid(CAP))
    if lengths is None:
        lengths = np.random.default_rng(seed).lognormal(5.5, 1.0, 3000).astype(np.int64)
    counts.add(np.minimum(lengths, CAP), lengths > CAP)
    return Scores(counts.curve())


def belief(n: int = 300, *, seed: int = 0, outlier: float = 0.05, scale: Scores | None = None, **given) -> Remaining:
    rng = np.random.default_rng(seed)
    scale = scale or scores()
    generated = given.get("generated", np.minimum(rng.lognormal(4.5, 1.2, n).astype(np.int64), CAP - 1))
    return Remaining(
        ids=np.arange(n),
        generated=generated,
        limits=given.get("limits", np.full(n, CAP)),
        score=scale.beyond(generated),
        mean=rng.normal(0, 0.7, n).astype(np.float32),
        sd=rng.uniform(0.4, 1.0, n).astype(np.float32),
        outlier=outlier,
        scores=scale,
    )


@pytest.mark.parametrize("outlier", [0.002, 0.05, 0.3])
@pytest.mark.parametrize("p", [0.001, 0.05, 0.25, 0.5, 0.75, 0.95, 0.999])
def test_quantiles_invert_the_survival_function(p, outlier):
    b = belief(outlier=outlier)
    t = b.quantile(p)
    assert (t >= 1).all()
    inside = t < CAP - b.generated
    assert (1.0 - b.survives(t) >= p - 0.012)[inside].all()
    shorter = t > 1
    assert (1.0 - b.survives(t - 1) <= p + 0.012)[shorter].all()


def test_many_levels_at_once_are_each_of_them():
    b, levels = belief(), np.array([0.001, 0.2, 0.5, 0.999])
    np.testing.assert_array_equal(b.quantiles(levels), [b.quantile(p) for p in levels])


@pytest.mark.parametrize("outlier", [0.002, 0.2])
def test_the_expectation_is_the_sum_of_the_survival_function(outlier):
    b = belief(outlier=outlier)
    summed = b.survival(np.arange(CAP)).sum(axis=1, dtype=np.float64)
    np.testing.assert_allclose(b.expected(), summed, rtol=0.03, atol=0.6)


def test_survival_falls_from_one_to_zero_at_the_limit():
    limits = np.random.default_rng(1).integers(CAP // 2, CAP + 1, 300)
    b = belief(generated=np.minimum(belief().generated, limits - 1), limits=limits)
    survival = b.survival(np.arange(-1, CAP + 5))
    assert (np.diff(survival, axis=1) <= 1e-6).all()
    assert (survival[:, :2] == 1.0).all()
    left = limits - b.generated
    assert (b.survives(left - 1) > 0).all()
    assert (b.survives(left) == 0).all()
    assert (b.quantile(0.999) <= left).all()
    assert (b.expected() <= left).all()


def test_expected_alive_adds_up_the_rows():
    b = belief()
    t = np.array([0, 1, 50, 400, CAP])
    np.testing.assert_allclose(b.expected_alive(t), b.survival(t).sum(axis=0, dtype=np.float64), rtol=1e-5)
    assert b.expected_alive(t)[0] == len(b)


def test_the_interval_is_central():
    low, high = belief().interval(0.9)
    assert (low == belief().quantile(0.05)).all()
    assert (high == belief().quantile(0.95)).all()


def test_one_horizon_per_sequence_is_the_diagonal_of_all_of_them():
    b = belief(n=40)
    t = np.random.default_rng(3).integers(0, 500, 40)
    np.testing.assert_array_equal(b.survives(t), b.survival(t)[np.arange(40), np.arange(40)])


def test_a_sequence_at_its_limit_has_nothing_left():
    b = belief(n=2, generated=np.array([CAP, 100]), limits=np.array([CAP, 100]))
    assert b.quantile(0.9).tolist() == [0, 0]
    assert b.expected().tolist() == [0.0, 0.0]
    assert b.survives(0).tolist() == [0.0, 0.0]


def test_one_token_from_the_cap_there_is_one_token_left():
    b = belief(n=1, generated=np.array([CAP - 1]))
    assert b.interval(0.9)[0].tolist() == b.interval(0.9)[1].tolist() == [1]
    assert b.expected().tolist() == [1.0]


def test_far_beyond_its_mates_a_sequence_is_believed_like_any_other_of_its_age():
    """Mates say about 100 tokens; this one is at 1,000. It is an outlier, not always about to end."""
    scale = scores()
    common = {
        "ids": np.arange(1),
        "generated": np.array([1000]),
        "limits": np.array([CAP]),
        "score": scale.beyond(np.array([1000])),
        "scores": scale,
        "outlier": 0.02,
    }
    stray = Remaining(mean=np.array([-1.5], np.float32), sd=np.array([0.4], np.float32), **common)
    anyone = Remaining(mean=np.zeros(1, np.float32), sd=np.ones(1, np.float32), **common)
    assert stray.expected()[0] == pytest.approx(anyone.expected()[0], rel=0.05)
    assert stray.quantile(0.5)[0] == pytest.approx(anyone.quantile(0.5)[0], rel=0.1)


def test_atoms_are_hit_exactly():
    b = belief(n=50, scale=scores(lengths=np.repeat([16, 512], 500)), generated=np.zeros(50, np.int64))
    for p in (0.1, 0.5, 0.9):
        assert set(b.quantile(p).tolist()) <= {16, 512}


@pytest.mark.parametrize("p", [0.0, 1.0, -1.0, float("nan")])
def test_quantiles_of_nothing_and_everything_are_refused(p):
    with pytest.raises(BeliefError, match=r"p is .*0\.001"):
        belief().quantile(p)


def test_a_belief_about_nobody_answers_with_empty_arrays():
    b = belief(n=0, generated=np.zeros(0, np.int64))
    assert b.expected().shape == b.quantile(0.5).shape == (0,)
    assert b.survival(np.array([1, 2])).shape == (0, 2)
    assert b.expected_alive(np.array([1])).tolist() == [0.0]
