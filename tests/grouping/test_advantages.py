import json
from collections.abc import Iterator
from itertools import product
from math import comb
from pathlib import Path

import numpy as np
import pytest

from grouping.advantages import (
    checked_rewards,
    has_zero_variance,
    prompt_advantages,
    shrinkage_weight,
    shrunk_advantages,
    shrunk_baseline,
    sibling_means,
)
from grouping.history import History
from grouping.pools import Pool, leave_prompt_out_pools

pytestmark = pytest.mark.fast

GOLDEN = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "golden.json").read_text(encoding="utf-8"))["cases"]
}
GRPO_CASES = [name for name in GOLDEN if name.startswith("adv_grpo_")]


def rows_by_group(group_ids: list) -> Iterator[np.ndarray]:
    for name in dict.fromkeys(group_ids):
        yield np.array([row for row, other in enumerate(group_ids) if other == name])


def split(case: dict) -> tuple[np.ndarray, list[np.ndarray]]:
    return np.array(case["inputs"]["rewards"], dtype=np.float64), list(rows_by_group(case["inputs"]["group_ids"]))


def close(case: dict, got: np.ndarray, name: str = "advantages") -> None:
    np.testing.assert_allclose(got, case["expected"][name], rtol=0, atol=case["tol"])


@pytest.mark.parametrize("name", GRPO_CASES)
def test_grpo_advantages_match_the_golden_case(name: str) -> None:
    case = GOLDEN[name]
    rewards, groups = split(case)
    params = case["params"]
    got = np.empty(len(rewards))

    def run() -> None:
        for rows in groups:
            got[rows] = prompt_advantages(
                checked_rewards(rewards[rows], "g"),
                "grpo",
                epsilon=params["eps"],
                ddof=params["ddof"],
                singleton=params.get("singleton", "zero"),
            )

    if "expect_error" in case:
        with pytest.raises(ValueError, match="finite"):
            run()
        return
    run()
    close(case, got)


def test_all_golden_grpo_cases_are_run() -> None:
    assert len(GRPO_CASES) == 11


@pytest.mark.parametrize(("name", "form"), [("adv_drgrpo", "dr_grpo"), ("adv_rloo", "rloo")])
def test_the_forms_without_a_std_match_the_golden_case(name: str, form: str) -> None:
    case = GOLDEN[name]
    rewards, groups = split(case)
    got = np.empty(len(rewards))
    for rows in groups:
        got[rows] = prompt_advantages(rewards[rows], form)
    close(case, got)


def test_rloo_is_dr_grpo_times_n_over_n_minus_one() -> None:
    case = GOLDEN["identity_rloo_drgrpo"]
    rewards, _ = split(case)
    close(case, prompt_advantages(rewards, "rloo"), "rloo")
    close(case, prompt_advantages(rewards, "dr_grpo") * len(rewards) / (len(rewards) - 1), "scaled_drgrpo")


@pytest.mark.parametrize("name", ["eb_baseline_mixed", "eb_baseline_all_equal"])
def test_empirical_bayes_with_other_prompts_matches_the_golden_case(name: str) -> None:
    case = GOLDEN[name]
    rewards, groups = split(case)
    labels = np.array([hash_free(case["inputs"]["cluster_ids"][rows[0]]) for rows in groups])
    pools = leave_prompt_out_pools([rewards[rows] for rows in groups], labels)
    got, weights = np.empty(len(rewards)), np.empty(len(rewards))
    for rows, pool in zip(groups, pools, strict=True):
        got[rows], weights[rows] = shrunk_advantages(rewards[rows], pool)
    close(case, got)
    close(case, weights, "w")
    close(case, rewards - got, "baseline")


def hash_free(cluster_id: str | int) -> int:
    return cluster_id if isinstance(cluster_id, int) else int(cluster_id.removeprefix("c"))


@pytest.mark.parametrize(("name", "weight"), [("eb_baseline_fixed_lambda", 0.25), ("cluster_loo_prompt_out", 1.0)])
def test_a_fixed_weight_on_the_other_prompts_mean_matches_the_golden_case(name: str, weight: float) -> None:
    case = GOLDEN[name]
    rewards, groups = split(case)
    pools = leave_prompt_out_pools([rewards[rows] for rows in groups], np.zeros(len(groups), dtype=np.int64))
    got = np.empty(len(rewards))
    for rows, pool in zip(groups, pools, strict=True):
        assert pool is not None
        got[rows] = rewards[rows] - shrunk_baseline(rewards[rows], pool.mean, weight)
    close(case, got)


def test_a_bucket_of_equal_rewards_leaves_no_signal() -> None:
    """Why rewards never choose the group: with a binary reward each bucket is its own mean."""
    case = GOLDEN["bucket_baseline_binary_kills_signal"]
    rewards = np.array(case["inputs"]["rewards"], dtype=np.float64)
    got = np.empty(len(rewards))
    for rows in rows_by_group(case["inputs"]["buckets"]):
        got[rows] = prompt_advantages(rewards[rows], "dr_grpo")
    close(case, got)


@pytest.mark.parametrize(
    ("key", "form", "epsilon"), [("rloo", "rloo", 0.0), ("drgrpo", "dr_grpo", 0.0), ("grpo_ddof1", "grpo", 0.0)]
)
def test_the_expected_gradient_is_the_golden_multiple_of_the_true_one(key: str, form: str, epsilon: float) -> None:
    case = GOLDEN["multiplier_binary"]
    got = [
        [bernoulli_multiplier(p, n, lambda r: prompt_advantages(r, form, epsilon)) for p in case["inputs"]["p"]]
        for n in case["inputs"]["n"]
    ]
    np.testing.assert_allclose(got, case["expected"][key], rtol=0, atol=case["tol"])


def score(rewards: np.ndarray, p: float) -> np.ndarray:
    """d log P(r)/dp of one answer whose reward is 1 with chance p: 1/p or -1/(1-p)."""
    return np.where(rewards > 0, 1.0 / p, -1.0 / (1.0 - p))


def bernoulli_multiplier(p: float, n: int, advantages) -> float:
    """E[mean A*score] over all numbers of right answers k: answers are exchangeable, so one order stands for all."""
    total = 0.0
    for k in range(n + 1):
        rewards = np.array([1.0] * k + [0.0] * (n - k))
        total += comb(n, k) * p**k * (1 - p) ** (n - k) * np.mean(advantages(rewards) * score(rewards, p))
    return float(total)


def test_the_leave_prompt_out_baseline_is_unbiased_over_all_outcomes() -> None:
    """Three prompts, three answers each: 2^9 outcomes. The gradient of prompt i's own mean reward is 1 per unit p_i."""
    chances, n = (0.2, 0.5, 0.7), 3
    multiplier, moved = np.zeros(3), False
    for bits in product((0.0, 1.0), repeat=3 * n):
        rewards = np.array(bits).reshape(3, n)
        chance = np.prod([p ** r.sum() * (1 - p) ** (n - r.sum()) for p, r in zip(chances, rewards, strict=True)])
        pools = leave_prompt_out_pools(list(rewards), np.zeros(3, dtype=np.int64))
        for i, p in enumerate(chances):
            advantages, weight = shrunk_advantages(rewards[i], pools[i], 0.8)
            moved = moved or weight > 0.1
            multiplier[i] += chance * np.mean(advantages * score(rewards[i], p))
    assert moved
    np.testing.assert_allclose(multiplier, 1.0, rtol=0, atol=1e-12)


def test_the_history_baseline_is_unbiased_over_all_outcomes_of_both_steps() -> None:
    """Two prompts, two answers each, two steps: 2^8 outcomes; the second step's baseline is the first's rewards."""
    chances, n = (0.3, 0.6), 2
    multiplier, moved = np.zeros(2), False

    def likelihood(rewards: np.ndarray) -> float:
        sums = rewards.sum(axis=1)
        return float(np.prod([p**s * (1 - p) ** (n - s) for p, s in zip(chances, sums, strict=True)]))

    for past_bits in product((0.0, 1.0), repeat=2 * n):
        past = np.array(past_bits).reshape(2, n)
        history = History(0.9)
        for i in range(2):
            history.add(0, str(i), i, past[i])
        pool = history.pools(1, np.zeros(2, dtype=np.int64))[0]
        for bits in product((0.0, 1.0), repeat=2 * n):
            rewards = np.array(bits).reshape(2, n)
            for i, p in enumerate(chances):
                advantages, weight = shrunk_advantages(rewards[i], pool, 0.8)
                moved = moved or weight > 0.1
                multiplier[i] += likelihood(past) * likelihood(rewards) * np.mean(advantages * score(rewards[i], p))
    assert moved
    np.testing.assert_allclose(multiplier, 1.0, rtol=0, atol=1e-12)


def test_an_own_reward_in_the_pool_would_be_seen_by_the_enumeration() -> None:
    """The control: a pool that holds the group's own answers gives less than the true gradient."""
    multiplier = bernoulli_multiplier(0.5, 3, lambda r: r - shrunk_baseline(r, float(np.mean(r)), 0.8))
    # b = 0.2*siblings + 0.8*mean: RLOO's multiplier is 1, the own mean's is (n-1)/n = 2/3; 0.2 + 0.8*2/3 = 0.7333
    assert multiplier == pytest.approx(0.2 + 0.8 * 2 / 3, abs=1e-12)


@pytest.mark.parametrize("form", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 0.1 + 0.2, 1e12, 1e-12])
def test_equal_rewards_give_exactly_zero(form: str, value: float) -> None:
    assert not prompt_advantages(np.full(7, value), form).any()


@pytest.mark.parametrize("form", ["grpo", "dr_grpo", "rloo"])
def test_rewards_equal_up_to_rounding_give_exactly_zero(form: str) -> None:
    # a range of 1e-9 of the largest reward: 1e6 and 1e6 + 0.0009 differ by less, 1e6 + 0.0011 by more
    assert not prompt_advantages(np.array([1e6, 1e6 + 9e-4]), form).any()
    assert prompt_advantages(np.array([1e6, 1e6 + 1.1e-3]), form).all()


def test_a_group_of_one_has_no_zero_variance_and_no_advantage_without_a_pool() -> None:
    one = np.array([0.7])
    assert not has_zero_variance(one)
    for form in ("grpo", "dr_grpo", "rloo"):
        assert prompt_advantages(one, form).tolist() == [0.0]
    assert shrunk_advantages(one, None)[0].tolist() == [0.0]


def test_a_group_of_one_is_measured_against_the_pool_whole() -> None:
    pool = Pool(mean=0.25, within=None, between=None, mean_noise=0.0, num_prompts=1, weight=1.0)
    advantages, weight = shrunk_advantages(np.array([1.0]), pool, 0.8)
    assert (advantages.tolist(), weight) == ([0.75], 1.0)


def test_the_weight_is_capped_and_grows_with_fewer_samples() -> None:
    pool = Pool(mean=0.5, within=0.2, between=0.04, mean_noise=0.01, num_prompts=8, weight=8.0)
    # v = 0.2/(n-1); w = v/(v + 0.05): n=2 -> 0.2/0.25, n=5 -> 0.05/0.1, n=21 -> 0.01/0.06
    assert [shrinkage_weight(pool, n) for n in (2, 5, 21)] == pytest.approx([0.8, 0.5, 1 / 6])
    assert [shrinkage_weight(pool, n, 0.6) for n in (1, 2, 5)] == pytest.approx([1.0, 0.6, 0.5])


@pytest.mark.parametrize(
    "pool",
    [
        None,
        Pool(mean=0.5, within=None, between=None, mean_noise=0.0, num_prompts=3, weight=3.0),
        Pool(mean=0.5, within=0.2, between=None, mean_noise=0.1, num_prompts=1, weight=1.0),
        Pool(mean=1.0, within=0.0, between=0.0, mean_noise=0.0, num_prompts=3, weight=3.0),
    ],
    ids=["no pool", "no within variance", "one prompt", "all rewards equal"],
)
def test_a_pool_that_cannot_weigh_itself_leaves_rloo(pool: Pool | None) -> None:
    rewards = np.array([1.0, 0.0, 0.0])
    advantages, weight = shrunk_advantages(rewards, pool)
    assert weight == 0.0
    assert advantages.tolist() == (rewards - sibling_means(rewards)).tolist() == [1.0, -0.5, -0.5]


def test_a_bad_reward_is_refused_with_its_group_and_sample() -> None:
    with pytest.raises(ValueError, match=r"finite, got nan \(group 0:p7:0, sample 2\)"):
        checked_rewards(np.array([1.0, 0.0, np.nan]), "0:p7:0")
    with pytest.raises(ValueError, match=r"non-empty.*group 0:p8:0"):
        checked_rewards(np.array([]), "0:p8:0")
