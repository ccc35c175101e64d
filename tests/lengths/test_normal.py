import numpy as np
import pytest
from scipy.stats import norm

from longtail.lengths import normal


def test_tables_agree_with_scipy():
    x = np.linspace(-8.9, 12.0, 9999)
    np.testing.assert_allclose(normal.survival(x), norm.sf(x), rtol=8e-3)
    np.testing.assert_allclose(normal.density(x), norm.pdf(x), rtol=8e-3, atol=1e-12)
    np.testing.assert_allclose(normal.inverse_mills(x), norm.pdf(x) / norm.sf(x), atol=1e-3)


def test_quantiles_agree_with_scipy_far_into_both_tails():
    p = np.concatenate([10.0 ** -np.arange(1, 12), np.linspace(0.001, 0.999, 999), 1 - 10.0 ** -np.arange(1, 9)])
    np.testing.assert_allclose(normal.quantile(p), norm.ppf(p), atol=2e-5)


def test_the_rough_quantile_is_close_where_a_search_starts():
    tail = np.geomspace(1e-12, 0.95, 500)
    np.testing.assert_allclose(normal.near_quantile(np.log(tail).astype(np.float32)), norm.isf(tail), atol=0.02)


def test_arguments_beyond_the_tables_take_their_ends():
    assert normal.survival(np.array([-1e9, 1e9])).tolist() == [1.0, pytest.approx(0.0, abs=1e-30)]


@pytest.mark.parametrize("cut", [-5.0, -1.0, 0.0, 1.5, 4.0])
def test_truncated_nodes_integrate_a_heavy_tail(cut):
    nodes, weights = normal.truncated_nodes(np.array([cut], np.float32))
    assert (nodes >= cut - 1e-3).all()
    # E[exp(s Z) | Z > cut] has a closed form.
    exact = np.exp(1.3**2 / 2) * norm.sf(cut - 1.3) / norm.sf(cut)
    assert np.exp(1.3 * nodes[0]) @ weights == pytest.approx(exact, rel=0.02)
