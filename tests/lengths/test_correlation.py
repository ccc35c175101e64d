"""Kendall's tau is SciPy's, and is known without it."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from longtail.lengths.correlation import tau_b


@given(st.integers(2, 120), st.integers(1, 20), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_tau_is_that_of_scipy_ties_included(n, distinct, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.integers(0, distinct + 1, n) / 7, rng.integers(0, 3, n) * 10.0
    tau, wanted = tau_b(x, y), kendalltau(x, y).statistic
    if math.isnan(wanted):
        assert tau is None
    else:
        assert tau == pytest.approx(wanted, abs=1e-6)


def test_what_a_run_and_a_server_load_has_no_statistics_package_in_it():
    code = (
        "import sys; import numpy as np; import longtail.runtime.controller; "
        "from longtail.runtime.order import rank_correlation; from longtail.serve.learned import Served; "
        "served = Served(); [served.observe(i / 60, i, False) for i in range(60)]; "
        "x = np.arange(60.0); print(rank_correlation(x, x), served.tau(), 'scipy.stats' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "1.0 1.0 False"
    )
