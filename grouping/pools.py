"""What a set of prompts says about the mean reward of one more prompt like them: the empirical-Bayes target.

Legend: R prompts in the set. A prompt's `weight` is the discounted number of its groups; 1 for one group in this batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PromptMoments:
    """Per-prompt reward moments, one entry a prompt."""

    weight: np.ndarray  # [R] discounted number of groups
    mean: np.ndarray  # [R] mean reward
    noise: np.ndarray  # [R] sampling variance of `mean` in units of the within-prompt variance: 1/n for one group
    within_sum: np.ndarray  # [R] discounted sum of the groups' variances (ddof 1), groups of two or more
    within_weight: np.ndarray  # [R] discounted number of groups of two or more


@dataclass(frozen=True)
class Pool:
    """A cluster's statistics, in reward units: mean mu, within-prompt variance s2, between-prompt variance tau2."""

    mean: float
    within: float | None  # s2; None when no group had two samples
    between: float | None  # tau2 before the cut at 0; None when within is unknown or there are fewer than two prompts
    mean_noise: float  # variance of `mean` as an estimate of the cluster's mean
    num_prompts: int
    weight: float  # discounted number of groups

    @property
    def tau2(self) -> float | None:
        """The between-prompt variance, 0 at least."""
        return None if self.between is None else max(0.0, self.between)


def moments_of_groups(rewards: Sequence[np.ndarray]) -> PromptMoments:
    """PromptMoments of one group a prompt, weight 1 each; `rewards` holds R arrays [G]."""
    sizes = np.array([len(group) for group in rewards], dtype=np.float64)
    means = np.array([np.mean(group) for group in rewards], dtype=np.float64)
    several = sizes > 1
    within = np.array([np.var(group, ddof=1) if len(group) > 1 else 0.0 for group in rewards], dtype=np.float64)
    return PromptMoments(np.ones(len(rewards)), means, 1.0 / sizes, within, several.astype(np.float64))


def pools_by_label(moments: PromptMoments, labels: np.ndarray) -> dict[int, Pool]:
    """The Pool of each label [R] with any weight.

    Weighted form of the method of moments: with prompt variances tau2 + s2*noise_i and weights a_i summing to A,
    E[sum a_i (m_i - mu)^2] = sum a_i (1 - a_i/A)(tau2 + s2*noise_i). For equal weights this is the textbook
    tau2 = Var(means; ddof 1) - s2/nbar, nbar the harmonic mean size, and mean_noise = (tau2 + s2/nbar)/R.
    """
    live = moments.weight > 0
    names, index = np.unique(labels[live], return_inverse=True)
    weight, mean, noise = moments.weight[live], moments.mean[live], moments.noise[live]

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(index, weights=values, minlength=len(names))

    total_weight = total(weight)
    centre = total(weight * mean) / total_weight
    spread = total(weight * (mean - centre[index]) ** 2)
    within_sum, within_weight = total(moments.within_sum[live]), total(moments.within_weight[live])
    free = weight * (1.0 - weight / total_weight[index])
    scale, spread_noise = total(free), total(free * noise)
    share, share_noise = total(weight**2) / total_weight**2, total(weight**2 * noise) / total_weight**2
    counts = np.bincount(index, minlength=len(names))
    pools = {}
    for k, name in enumerate(names):
        within = float(within_sum[k] / within_weight[k]) if within_weight[k] > 0 else None
        between = None
        if within is not None and counts[k] > 1 and scale[k] > 1e-12 * total_weight[k]:
            between = float((spread[k] - within * spread_noise[k]) / scale[k])
        mean_noise = max(0.0, between or 0.0) * float(share[k]) + (within or 0.0) * float(share_noise[k])
        pools[int(name)] = Pool(float(centre[k]), within, between, mean_noise, int(counts[k]), float(total_weight[k]))
    return pools


def leave_prompt_out_pools(
    rewards: Sequence[np.ndarray], labels: np.ndarray, prompts: Sequence[str] | None = None
) -> list[Pool | None]:
    """For each group, the Pool of the other prompts' groups with its label; None where there are none.

    A group of the same prompt never enters: its answers are as dependent on the prompt's own luck as the group's.
    """
    owner = np.array(prompts if prompts is not None else range(len(rewards)))
    moments = moments_of_groups(rewards)
    pools: list[Pool | None] = []
    for i, label in enumerate(labels):
        others = (labels == label) & (owner != owner[i])
        if not others.any():
            pools.append(None)
            continue
        part = PromptMoments(*(getattr(moments, name)[others] for name in PromptMoments.__dataclass_fields__))
        pools.append(pools_by_label(part, labels[others])[int(label)])
    return pools
