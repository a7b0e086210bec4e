import numpy as np
import pytest

from grouping.pools import leave_prompt_out_pools, moments_of_groups, pools_by_label

pytestmark = pytest.mark.fast


def test_equal_weights_give_the_textbook_moments() -> None:
    groups = [np.array([1.0, 0.0, 1.0]), np.array([1.0, 1.0, 1.0]), np.array([1.0])]
    pool = pools_by_label(moments_of_groups(groups), np.zeros(3, dtype=np.int64))[0]
    # means 2/3, 1, 1: mu 8/9, variance 1/27. s2: mean of 1/3 and 0 = 1/6, nbar harmonic = 3/(1/3+1/3+1) = 1.8
    assert pool.mean == pytest.approx(8 / 9)
    assert pool.within == pytest.approx(1 / 6)
    assert pool.between == pytest.approx(1 / 27 - (1 / 6) / 1.8)
    assert pool.tau2 == 0.0
    assert pool.mean_noise == pytest.approx((1 / 6) / 1.8 / 3)
    assert (pool.num_prompts, pool.weight) == (3, 3.0)


def test_each_label_pools_its_own_prompts() -> None:
    groups = [np.array([1.0, 1.0]), np.array([0.0, 0.0]), np.array([0.5, 0.5])]
    pools = pools_by_label(moments_of_groups(groups), np.array([4, 2, 4]))
    assert {label: pool.mean for label, pool in pools.items()} == {2: 0.0, 4: 0.75}
    assert pools[2].between is None


def test_the_between_variance_is_unbiased_for_unequal_weights() -> None:
    """The mean over many draws of prompts with a known tau2 comes out at tau2, within four standard errors."""
    draw = np.random.default_rng(0)
    tau2, found = 0.04, []
    for _ in range(800):
        truth = 0.5 + np.sqrt(tau2) * draw.standard_normal(5)
        groups = [p + 0.5 * draw.standard_normal(n) for p, n in zip(truth, (2, 4, 8, 3, 6), strict=True)]
        moments = moments_of_groups(groups)
        moments.weight[:] = (1.0, 0.1, 0.6, 0.9, 0.3)
        between = pools_by_label(moments, np.zeros(5, dtype=np.int64))[0].between
        assert between is not None
        found.append(between)
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - tau2) < 4 * error < tau2 / 2


def test_two_groups_of_one_prompt_never_pool_for_each_other() -> None:
    groups = [np.array([1.0, 0.0]), np.array([1.0, 1.0]), np.array([0.0, 0.0])]
    pools = leave_prompt_out_pools(groups, np.zeros(3, dtype=np.int64), ["a", "a", "b"])
    assert [pool.mean if pool else None for pool in pools] == [0.0, 0.0, 0.75]
    assert leave_prompt_out_pools(groups[:2], np.zeros(2, dtype=np.int64), ["a", "a"]) == [None, None]


def test_no_weight_is_no_pool() -> None:
    moments = moments_of_groups([np.array([1.0, 0.0])])
    moments.weight[:] = 0.0
    assert pools_by_label(moments, np.zeros(1, dtype=np.int64)) == {}
