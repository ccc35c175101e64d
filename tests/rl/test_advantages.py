import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.core.errors import RewardError
from longtail.rl.advantages import group_advantages


def trl_advantages(rewards: list[float]) -> np.ndarray:
    """``GRPOTrainer``: ``(r - mean) / (std + 1e-4)`` with torch's (unbiased) standard deviation."""
    r = torch.tensor(rewards, dtype=torch.float64)
    return ((r - r.mean()) / (r.std() + 1e-4)).numpy()


@given(st.lists(st.integers(-50, 50).map(lambda x: x / 8), min_size=2, max_size=32).filter(lambda r: len(set(r)) > 1))
def test_advantages_equal_trls(rewards):
    np.testing.assert_allclose(group_advantages(rewards), trl_advantages(rewards), rtol=1e-9)


def test_without_scaling_only_the_mean_is_removed():
    np.testing.assert_allclose(group_advantages([1.0, 0.0, 0.0, 3.0], scale="none"), [0.0, -1.0, -1.0, 2.0])


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("reward", [1.0, 0.0, -3.25, 0.1, 1e6 + 0.1, 1e-30])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_equal_rewards_give_exactly_zero(reward, size, scale):
    assert group_advantages([reward] * size, scale=scale).tolist() == [0.0] * size


def test_float_noise_on_a_large_constant_gives_exactly_zero():
    noisy = np.float32(1e6) + np.random.default_rng(0).uniform(-0.1, 0.1, 8).astype(np.float32)
    assert len(set(noisy.tolist())) > 1
    assert not group_advantages(noisy.tolist()).any()


def test_a_spread_far_below_epsilon_is_not_blown_up():
    assert not group_advantages([1.0, 1.0, 1.0, 1.0 + 1e-8]).any()
    assert np.abs(group_advantages([1e-9, 0.0, 0.0, 0.0])).max() < 1e-4


def test_a_real_difference_on_a_large_constant_counts():
    np.testing.assert_allclose(group_advantages([1e6, 1e6 + 2]), [-(2**-0.5), 2**-0.5], rtol=1e-3)


def test_rewards_rounded_to_bfloat16_keep_their_order():
    rewards = torch.tensor([0.1, 0.101, 0.2, 0.9]).bfloat16().float().tolist()
    assert np.all(np.diff(group_advantages(rewards)) >= 0)


def test_excluded_samples_are_nan_and_do_not_move_the_others():
    with_none = group_advantages([1.0, None, 0.0, None])
    assert np.isnan(with_none[[1, 3]]).all()
    assert with_none[[0, 2]].tolist() == group_advantages([1.0, 0.0]).tolist()


def test_a_group_with_one_or_no_reward_left_has_no_signal():
    assert group_advantages([None, 5.0, None])[1] == 0.0
    assert np.isnan(group_advantages([None, None])).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rewards_that_are_not_finite_are_refused_by_position(bad):
    with pytest.raises(RewardError, match="sample 1"):
        group_advantages([0.0, bad])
