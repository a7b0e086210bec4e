"""Whether a canary keeps its limits, judged as often as one likes. Pure numbers.

Legend: S, F failures (or slow answers) and the others of n = S + F; E an e-process, evidence against "the limits are
kept": its mean is at most 1 where they are, so by Ville's inequality it ever reaches 1/a with probability a at most,
at any number of looks. ln E is handled, in nats.

For shares, E is the likelihood of all answers under Krichevsky and Trofimov's mixture, Beta(1/2, 1/2), over the
largest likelihood that keeps the limits: Wasserman, Ramdas and Balakrishnan (2020), Universal inference, PNAS 117,
section 8; Robbins (1970), Statistical methods related to the law of the iterated logarithm. What is unknown of the
stable version (its error rate, its p95) is where it speaks most for the canary, so that no share of `a` is set
aside for it. For rewards it is the bet of Waudby-Smith and Ramdas (2024), Estimating means of bounded random
variables by betting, J. R. Stat. Soc. B 86.

Each of the 3 tests has a third of error_probability. That of the rewards runs over the whole canary. Those of traffic
begin anew with each step, as load changes, so that the steps share it; in a step its windows (a second one begins where
counts were lost) have a half, a sixth, ..., 1 / (r + 1)(r + 2) of that: the sum over all is error_probability.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize, special

from core.errors import UserError
from serve.config import CanaryConfig
from serve.rollout.traffic import EDGES_S, NUM_BUCKETS, VersionTraffic

MAX_SLOW = 0.05  # of answers slower than a p95, by definition
NUM_TESTS = 3  # errors, latency, rewards
BETS = np.linspace(0.05, 0.95, 19)  # shares of the stake, mixed evenly


@dataclass(frozen=True)
class Verdict:
    """What is known now."""

    kind: Literal["breach", "good", "wait"]
    reason: str  # with the numbers; for wait, what is missing


def threshold(config: CanaryConfig, num_restarts: int) -> float:
    """ln(1/a), the evidence that is a breach, of a step's window of traffic after num_restarts others."""
    spending = (num_restarts + 1) * (num_restarts + 2)
    return math.log(len(config.shares) * NUM_TESTS * spending / config.error_probability)


def judge_traffic(
    config: CanaryConfig, stable: VersionTraffic, canary: VersionTraffic, num_restarts: int = 0
) -> Verdict:
    """The Verdict on a step's traffic so far.

    Good needs min_requests answers of each version, and a canary within its limits as far as seen: no proof of a
    breach among few answers is no proof of health.
    """
    limit = threshold(config, num_restarts)
    if error_evidence(stable, canary, config.max_error_rate_increase) >= limit:
        return Verdict("breach", _errors(config, stable, canary))
    if latency_evidence(stable, canary, config.max_latency_ratio) >= limit:
        return Verdict("breach", _slowness(config, stable, canary))
    for name, traffic in (("canary", canary), ("stable", stable)):
        missing = config.min_requests - traffic.num_requests
        if missing > 0:
            return Verdict("wait", f"{missing} more answers of {name}, which has {traffic.num_requests}")
    if error_rate(canary) > error_rate(stable) + config.max_error_rate_increase:
        return Verdict("wait", f"more answers to tell: {_errors(config, stable, canary)}")
    num_slow = slow_answers(stable, canary, config.max_latency_ratio)
    if num_slow > MAX_SLOW * sum(canary.ttft_counts):
        return Verdict("wait", f"more answers to tell: {_slowness(config, stable, canary)}")
    return Verdict("good", f"{canary.num_requests} answers within the limits")


def judge_rewards(config: CanaryConfig, stable: Sequence[float], canary: Sequence[float]) -> Verdict:
    """The Verdict, breach or good, on the rewards [n] of all probes so far; UserError outside 0..1 or unpaired."""
    evidence = reward_evidence(stable, canary, config.max_reward_loss)
    means = f"{len(canary)} probes earn {np.mean(canary):.3f} by the canary, {np.mean(stable):.3f} by stable"
    if evidence < math.log(NUM_TESTS / config.error_probability):
        return Verdict("good", means)
    return Verdict("breach", f"reward: {means}; at most {config.max_reward_loss:.1%} may be lost")


def error_rate(traffic: VersionTraffic) -> float:
    """The share of answers that failed; 0 without any."""
    return traffic.num_errors / max(1, traffic.num_requests)


def error_evidence(stable: VersionTraffic, canary: VersionTraffic, margin: float) -> float:
    """ln E against: the canary's error rate is at most stable's plus margin."""
    counts = [(traffic.num_errors, traffic.num_requests - traffic.num_errors) for traffic in (stable, canary)]
    low, high = error_rate(stable), error_rate(canary) - margin
    if high <= low:
        return 0.0

    def misfit(rate: float) -> float:  # of stable at this rate and of the canary at the worst that it may have then
        return -float(_likelihood(*counts[0], rate) + _likelihood(*counts[1], rate + margin))

    # Convex, and its least is between what either fits best. At the ends too: the search stays off them.
    found = optimize.minimize_scalar(misfit, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    least = min(misfit(low), misfit(high), float(found.fun))
    return float(_mixture(*counts[0]) + _mixture(*counts[1])) + least


def latency_evidence(stable: VersionTraffic, canary: VersionTraffic, ratio: float) -> float:
    """ln E against: at most 5 % of the canary's answers are slower than ratio * stable's p95.

    For each bucket, as if the p95 lay in it: evidence that more than 5 % of stable's answers are above its lower edge
    speaks against that, and so is no excuse; what counts as slow is above ratio * its upper edge. The least stands.
    """
    above_stable, above_canary = (_at_or_above(traffic) for traffic in (stable, canary))
    num_stable, num_canary = above_stable[0], above_canary[0]
    at_least = above_stable[:-1]  # above the lower edge of each bucket
    slow = above_canary[[first_slow_bucket(bucket, ratio) for bucket in range(NUM_BUCKETS)]]
    rates = np.array([at_least / max(1, num_stable), slow / max(1, num_canary)])
    kept = np.array([np.maximum(rates[0], MAX_SLOW), np.minimum(rates[1], MAX_SLOW)])
    evidence = np.zeros(NUM_BUCKETS)
    for counts, num, rate in ((at_least, num_stable, kept[0]), (slow, num_canary, kept[1])):
        evidence += _mixture(counts, num - counts) - _likelihood(counts, num - counts, rate)
    return float(evidence.min())


def slow_answers(stable: VersionTraffic, canary: VersionTraffic, ratio: float) -> int:
    """Answers of the canary slower than ratio * the p95 of stable as seen; 0 where stable has none."""
    bucket = stable.bucket_of(1 - MAX_SLOW)
    return 0 if bucket is None else sum(canary.ttft_counts[first_slow_bucket(bucket, ratio) :])


def first_slow_bucket(bucket: int, ratio: float) -> int:
    """The first bucket that is whole above ratio * the upper edge of this one; NUM_BUCKETS: none is."""
    if bucket == NUM_BUCKETS - 1:
        return NUM_BUCKETS
    lowest = bisect.bisect_left(EDGES_S, ratio * EDGES_S[bucket])
    return lowest + 1 if lowest < len(EDGES_S) else NUM_BUCKETS


def reward_evidence(stable: Sequence[float], canary: Sequence[float], max_loss: float) -> float:
    """ln E against: the canary earns at least (1 - max_loss) of what stable earns on these probes."""
    if len(stable) != len(canary):
        raise UserError(f"rewards of the probe set must come in pairs, got {len(stable)} and {len(canary)}")
    if len(stable) == 0:
        raise UserError("the probe set must have at least 1 task, got none; name held-out rows with known answers")
    both = np.array([stable, canary], np.float64)
    if not np.all((both >= 0) & (both <= 1)):  # a NaN is neither
        worst = both[~((both >= 0) & (both <= 1))][0]
        raise UserError(f"rewards of the probe set must lie within 0 and 1, got {worst}; use another reward term")
    lost = (1 - max_loss) * both[0] - both[1]  # at least -1, and 0 at most in the mean where the limit is kept
    return float(special.logsumexp(np.log1p(BETS[:, None] * lost).sum(axis=1)) - math.log(len(BETS)))


def _mixture(hits: float | np.ndarray, others: float | np.ndarray) -> float | np.ndarray:
    """ln of the likelihood mixed over all rates."""
    return special.betaln(hits + 0.5, others + 0.5) - math.log(math.pi)


def _likelihood(hits: float | np.ndarray, others: float | np.ndarray, rate: float | np.ndarray) -> float | np.ndarray:
    return special.xlogy(hits, rate) + special.xlog1py(others, -rate)


def _at_or_above(traffic: VersionTraffic) -> np.ndarray:
    """Answers in each bucket or a later one [NUM_BUCKETS + 1]; the last is 0."""
    return np.append(np.cumsum(traffic.ttft_counts[::-1])[::-1], 0)


def _errors(config: CanaryConfig, stable: VersionTraffic, canary: VersionTraffic) -> str:
    return (
        f"errors: {canary.num_errors} of {canary.num_requests} answers of the canary failed "
        f"({error_rate(canary):.2%}), {stable.num_errors} of {stable.num_requests} of stable "
        f"({error_rate(stable):.2%}); at most {config.max_error_rate_increase:.2%} more may fail"
    )


def _slowness(config: CanaryConfig, stable: VersionTraffic, canary: VersionTraffic) -> str:
    num_slow = slow_answers(stable, canary, config.max_latency_ratio)
    p95 = stable.p(1 - MAX_SLOW)
    return (
        f"latency: {num_slow} of {sum(canary.ttft_counts)} answers of the canary had their first token later than "
        f"{config.max_latency_ratio:g} times stable's p95 of {p95 or 0:.3g} s; at most {MAX_SLOW:.0%} may"
    )
