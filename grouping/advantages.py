"""Baselines and advantages: pure functions from the rewards of a prompt's G answers to how much better each one was.

Every baseline here may depend on the prompt, on past steps, on other prompts' answers and on an answer's siblings,
never on the answer itself: that keeps the policy gradient unbiased (up to the constant and std of the prompt forms).
"""

from typing import Literal

import numpy as np

from grouping.pools import Pool

PromptForm = Literal["grpo", "dr_grpo", "rloo"]
ZERO_RANGE = 1e-9  # of max(1, |reward|): below it all rewards of a group count as equal


def checked_rewards(rewards: np.ndarray, group_id: str) -> np.ndarray:
    """The rewards [G] as float64; ValueError names the group (and the sample) that has none, or one not finite."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"rewards must be a non-empty row of numbers, got shape {values.shape} (group {group_id})")
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"rewards must be finite, got {values[bad[0]]} (group {group_id}, sample {bad[0]}); "
            "mend the reward function"
        )
    return values


def has_zero_variance(rewards: np.ndarray) -> bool:
    """Whether two or more rewards [G] are all equal, up to rounding; False for a group of one."""
    if len(rewards) < 2:
        return False
    return bool(np.ptp(rewards) <= ZERO_RANGE * max(1.0, float(np.max(np.abs(rewards)))))


def prompt_advantages(
    rewards: np.ndarray,
    form: PromptForm,
    epsilon: float = 1e-4,
    ddof: int = 1,
    singleton: Literal["zero", "raw"] = "zero",
) -> np.ndarray:
    """Advantages [G] against the prompt's own answers, in float64.

    grpo: (r - mean)/(std + epsilon), DeepSeekMath 2402.03300; dr_grpo: r - mean, 2503.20783; rloo: r minus the mean of
    the other answers, 2402.14740. Equal rewards give exactly 0. A group of one gives 0; `raw` is verl's convention
    (mean 0, std 1), kept for comparison.
    """
    if len(rewards) == 1:
        scale = 1.0 + epsilon if form == "grpo" else 1.0
        return rewards / scale if singleton == "raw" else np.zeros(1)
    if has_zero_variance(rewards):
        return np.zeros(len(rewards))
    if form == "rloo":
        return rewards - sibling_means(rewards)
    centred = rewards - np.mean(rewards)
    if form == "dr_grpo":
        return centred
    return centred / (np.std(rewards, ddof=ddof) + epsilon)


def sibling_means(rewards: np.ndarray) -> np.ndarray:
    """For each answer the mean reward of the others [G]; G of two or more."""
    return (np.sum(rewards) - rewards) / (len(rewards) - 1)


def shrinkage_weight(pool: Pool | None, num_samples: int, max_shrinkage: float = 1.0) -> float:
    """How far the baseline moves from the siblings' mean to the pool's: w = v/(v + u), v = s2/(n-1), u = tau2 + noise.

    1 for a group of one. 0 without a pool, or where the pool cannot tell within- from between-prompt variance. Never
    depends on the group's own rewards: with them the estimate is biased (multiplier 0.77 to 0.80).
    """
    if pool is None:
        return 0.0
    if num_samples == 1:
        return 1.0
    if not pool.within or pool.tau2 is None:
        return 0.0
    sibling_noise = pool.within / (num_samples - 1)
    weight = sibling_noise / (sibling_noise + pool.tau2 + pool.mean_noise)
    return min(weight, max_shrinkage)


def shrunk_baseline(rewards: np.ndarray, pool_mean: float, weight: float) -> np.ndarray:
    """The baseline [G]: (1 - weight) * mean of the siblings + weight * pool_mean."""
    if len(rewards) == 1:
        return np.full(1, pool_mean)
    return (1.0 - weight) * sibling_means(rewards) + weight * pool_mean


def shrunk_advantages(rewards: np.ndarray, pool: Pool | None, max_shrinkage: float = 1.0) -> tuple[np.ndarray, float]:
    """Advantages [G] against the empirical-Bayes baseline, and the weight of the pool's mean in it.

    Shrinkage baselines, 2511.03710, with a cluster as the target. Without a pool: RLOO, and 0 for a group of one.
    """
    weight = shrinkage_weight(pool, len(rewards), max_shrinkage)
    if pool is None or weight == 0.0:
        return prompt_advantages(rewards, "rloo"), 0.0
    return rewards - shrunk_baseline(rewards, pool.mean, weight), weight
