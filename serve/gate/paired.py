"""How much of its reward a model loses against another on the same tasks, with an upper confidence bound. Pure numbers.

Legend: f, c rewards of the full model and of the candidate; n tasks; d the relative loss (mean f - mean c) / mean f.

The bound inverts a test, as in Fieller (1954), Some problems in interval estimation, J. R. Stat. Soc. B 16: d is below
x where the mean of c - (1 - x) f is above 0 by more than t standard errors. The normal approximation alone is dishonest
where losses are rare: with none seen it would promise that there are none. So t^2/2 imaginary tasks are added that the
candidate loses whole, in the spirit of Agresti and Coull (1998), The American Statistician 52. For rare losses this is
within half a percent of the exact Poisson bound (Garwood 1936) from five losses on, and above it below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from core.errors import UserError

MOST_TASKS = 10**7  # beyond, needed_tasks is not worth naming


@dataclass(frozen=True)
class PairedLoss:
    """The comparison of two models on the same tasks."""

    num_tasks: int
    full_reward: float  # mean
    candidate_reward: float
    relative_loss: float | None  # below 0: the candidate earns more; None: the full model earns nothing
    upper_bound: float  # of the relative loss, one-sided; at most 1
    needed_tasks: int | None  # that would bring the bound below the limit at these rates; None: no number would


def compare(full: Sequence[float], candidate: Sequence[float], confidence: float, limit: float) -> PairedLoss:
    """The PairedLoss of rewards [n] in 0..1, task by task; `limit` is what needed_tasks is reckoned for.

    UserError where the rewards do not pair, or lie outside 0..1.
    """
    both = np.array([full, candidate], np.float64) if len(full) == len(candidate) else np.empty((2, 0))
    if both.shape[1] < 2:
        raise UserError(f"rewards must come in at least 2 pairs, got {len(full)} and {len(candidate)} (compare)")
    if not (np.all(both >= 0) and np.all(both <= 1)):  # a NaN fails both
        worst = both[~((both >= 0) & (both <= 1))][0]
        raise UserError(f"rewards must lie within 0 and 1 to be compared, got {worst}; use another first reward term")
    num = both.shape[1]
    mean_full, mean_candidate = (float(mean) for mean in both.mean(axis=1))
    if mean_full == 0:
        return PairedLoss(num, 0.0, mean_candidate, None, 1.0, None)
    moments = (both @ both.T) / num
    means = both.mean(axis=1)
    bound = _upper_bound(means, moments, num, confidence)
    loss = (mean_full - mean_candidate) / mean_full
    needed = None if loss >= limit else _needed(means, moments, confidence, limit)
    return PairedLoss(num, mean_full, mean_candidate, loss, bound, needed)


def _upper_bound(means: np.ndarray, moments: np.ndarray, num: float, confidence: float) -> float:
    """The bound for n tasks with these means [2] and second moments [2, 2] of (f, c)."""
    quantile = float(stats.t.ppf(confidence, num - 1))
    imaginary = quantile**2 / 2
    total = num + imaginary
    lost = np.array([1.0, 0.0])
    means = (num * means + imaginary * lost) / total
    moments = (num * moments + imaginary * np.outer(lost, lost)) / total
    spread = (moments - np.outer(means, means)) * quantile**2 / total
    # The kept share r = 1 - d solves (mean c - r mean f)^2 = t^2 var(c - r f): a r^2 - 2 b r + e = 0, smaller root.
    a = means[0] ** 2 - spread[0, 0]
    b = means[0] * means[1] - spread[0, 1]
    e = means[1] ** 2 - spread[1, 1]
    if a <= 0 or e <= 0:  # too few tasks to tell the reward from 0
        return 1.0
    kept = (b - math.sqrt(max(0.0, b * b - a * e))) / a
    return min(1.0, 1.0 - kept)


def _needed(means: np.ndarray, moments: np.ndarray, confidence: float, limit: float) -> int | None:
    """The smallest number of tasks with the same means and moments whose bound is below the limit, by bisection."""
    low, high = 2, 4
    while _upper_bound(means, moments, high, confidence) >= limit:
        low, high = high, high * 2
        if high > MOST_TASKS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if _upper_bound(means, moments, middle, confidence) >= limit:
            low = middle
        else:
            high = middle
    return high
