"""The judgement of a canary: rarely wrong however often it is asked, and soon right about a bad one."""

import math

import numpy as np
import pytest

from core.errors import UserError
from serve.config import CanaryConfig
from serve.rollout.sequential import (
    error_evidence,
    first_slow_bucket,
    judge_rewards,
    judge_traffic,
    latency_evidence,
    reward_evidence,
    threshold,
)
from serve.rollout.traffic import EDGES_S, NUM_BUCKETS, VersionTraffic

pytestmark = pytest.mark.fast
CONFIG = CanaryConfig()
P95_OF_NORMAL = 1.6449


class Stream:
    """A version's answers as they come: failures, and log-normal times to first token."""

    def __init__(self, seed: int, error_rate: float, median_s: float) -> None:
        self._generator = np.random.default_rng(seed)
        self._error_rate, self._median_s = error_rate, median_s
        self._counts = np.zeros(NUM_BUCKETS, int)
        self._num = self._num_errors = 0

    def more(self, num: int) -> VersionTraffic:
        """The totals after `num` more answers."""
        seconds = self._median_s * np.exp(0.5 * self._generator.standard_normal(num))
        self._counts += np.bincount(np.searchsorted(EDGES_S, seconds), minlength=NUM_BUCKETS)
        self._num += num
        self._num_errors += int(self._generator.binomial(num, self._error_rate))
        return VersionTraffic(self._num, self._num_errors, tuple(self._counts.tolist()))


def answers_until_breach(stable: Stream, canary: Stream, ratio: int, looks: range) -> int | None:
    """Canary answers seen at the look that breaks it off; stable has `ratio` times as many."""
    for num in looks:
        verdict = judge_traffic(CONFIG, stable.more(looks.step * ratio), canary.more(looks.step))
        if verdict.kind == "breach":
            return num
    return None


# Exactly at the limits: 1 % more errors, and everything 1.5 times as slow
@pytest.mark.parametrize(("error_rate", "ratio"), [(0.0, 1), (0.02, 1), (0.02, 20)])
def test_a_canary_at_its_limits_is_rarely_broken_off_in_many_looks(error_rate, ratio):
    alarms = 0
    for seed in range(60):
        stable = Stream(2 * seed, error_rate, 0.2)
        canary = Stream(2 * seed + 1, error_rate + CONFIG.max_error_rate_increase, 0.2 * CONFIG.max_latency_ratio)
        alarms += answers_until_breach(stable, canary, ratio, range(20, 1200, 20)) is not None
    # 60 rollouts of one step; the whole canary may be wrong in 0.05 of its rollouts, which is 3
    assert alarms <= CONFIG.error_probability * 60


def test_the_evidence_of_single_answers_is_that_of_the_formula():
    one, failed = VersionTraffic(1, 0), VersionTraffic(1, 1)
    # The mixture gives one answer 1/2 either way. Alone, a failure of the canary may have had probability 1.
    assert error_evidence(VersionTraffic(), failed, 0.01) == pytest.approx(math.log(0.5))
    # Beside a good one of stable: (1 - p)(p + 0.01) is largest at p = 0.495, with 0.505^2
    assert error_evidence(one, failed, 0.01) == pytest.approx(math.log(0.5 * 0.5 / 0.505**2))
    # One bet on the canary's loss of all of a reward of 1, 5 % allowed: the mean of 1 + 0.95 b over b is 1 + 0.95 / 2
    assert reward_evidence([1.0], [0.0], 0.05) == pytest.approx(math.log(1 + 0.95 / 2))


def test_the_evidence_of_errors_is_an_e_process():
    # Its mean at a fixed time is at most 1 where the limit is kept, so it exceeds 1/a in a share of at most a
    generator = np.random.default_rng(5)
    for stable_rate, num_stable in [(0.0, 200), (0.01, 2000), (0.3, 200)]:
        exceeded = 0
        for _ in range(1000):
            stable = VersionTraffic(num_stable, int(generator.binomial(num_stable, stable_rate)))
            canary = VersionTraffic(200, int(generator.binomial(200, stable_rate + 0.01)))
            exceeded += error_evidence(stable, canary, 0.01) >= math.log(1 / 0.1)
        assert exceeded <= 100


def test_rewards_at_the_limit_are_rarely_a_breach():
    generator = np.random.default_rng(9)
    exceeded = 0
    for _ in range(1000):
        stable = (generator.random(64) < 0.6).astype(float)
        canary = stable * (generator.random(64) >= CONFIG.max_reward_loss)  # loses just that share
        exceeded += reward_evidence(stable.tolist(), canary.tolist(), CONFIG.max_reward_loss) >= math.log(1 / 0.05)
    assert exceeded <= 50


@pytest.mark.parametrize(("ratio", "most"), [(99, 400), (19, 400), (1, 600)])
def test_a_tenth_of_failures_is_caught_within_a_few_hundred_answers(ratio, most):
    found = [
        answers_until_breach(Stream(seed, 0.01, 0.2), Stream(99 - seed, 0.1, 0.2), ratio, range(5, 800, 5))
        for seed in range(12)
    ]
    assert max(num or 10**9 for num in found) <= most


@pytest.mark.parametrize(("ratio", "most"), [(99, 100), (19, 100), (1, 500)])
def test_three_times_the_latency_is_caught_within_a_few_hundred_answers(ratio, most):
    found = [
        answers_until_breach(Stream(seed, 0.01, 0.2), Stream(99 - seed, 0.01, 0.6), ratio, range(5, 800, 5))
        for seed in range(12)
    ]
    assert max(num or 10**9 for num in found) <= most


def test_a_breach_says_its_numbers():
    stable, canary = VersionTraffic(4000, 4), VersionTraffic(200, 40)
    verdict = judge_traffic(CONFIG, stable, canary)
    assert verdict.kind == "breach"
    assert verdict.reason == (
        "errors: 40 of 200 answers of the canary failed (20.00%), 4 of 4000 of stable (0.10%); "
        "at most 1.00% more may fail"
    )
    fast, slow = Stream(1, 0, 0.2).more(4000), Stream(2, 0, 2.0).more(100)
    verdict = judge_traffic(CONFIG, fast, slow)
    assert verdict.kind == "breach"
    # The p95 of stable is 0.2 * exp(0.5 * 1.645) = 0.455 s; the sample's is one bucket of 4.7 % higher
    assert fast.p(0.95) == pytest.approx(0.2 * math.exp(0.5 * P95_OF_NORMAL), rel=0.1)
    assert "answers of the canary had their first token later than 1.5 times stable's p95 of 0.479 s" in verdict.reason


def test_a_step_waits_for_enough_answers_of_both():
    enough, few = VersionTraffic(50, 0), VersionTraffic(49, 0)
    assert judge_traffic(CONFIG, enough, enough).kind == "good"
    assert judge_traffic(CONFIG, enough, few).reason == "1 more answers of canary, which has 49"
    assert judge_traffic(CONFIG, few, enough).reason == "1 more answers of stable, which has 49"


def test_a_canary_that_looks_bad_is_not_good_for_want_of_proof():
    # 3 of 50 are too few to prove more than 1 %, and too many to go on
    verdict = judge_traffic(CONFIG, VersionTraffic(500, 0), VersionTraffic(50, 3))
    assert verdict.kind == "wait"
    assert verdict.reason.startswith("more answers to tell: errors: 3 of 50")


def test_a_canary_that_is_better_is_no_evidence():
    stable, canary = Stream(1, 0.2, 0.5).more(1000), Stream(2, 0.0, 0.1).more(1000)
    assert error_evidence(stable, canary, 0.01) == 0
    assert latency_evidence(stable, canary, 1.5) < 0


def test_without_a_stable_answer_nothing_is_proven():
    canary = Stream(1, 0.0, 30.0).more(500)
    assert latency_evidence(VersionTraffic(), canary, 1.5) <= 0
    assert latency_evidence(VersionTraffic(), VersionTraffic(), 1.5) == pytest.approx(0)
    assert error_evidence(VersionTraffic(), VersionTraffic(500, 300), 0.01) < 1


def test_what_is_slow_begins_above_the_limit():
    for bucket in (0, 100, NUM_BUCKETS - 20):
        first = first_slow_bucket(bucket, 1.5)
        assert EDGES_S[first - 1] >= 1.5 * EDGES_S[bucket] > EDGES_S[first - 2]
    assert first_slow_bucket(NUM_BUCKETS - 2, 1.5) == NUM_BUCKETS  # 150 s is beyond the last edge
    assert first_slow_bucket(NUM_BUCKETS - 1, 1.5) == NUM_BUCKETS


def test_half_the_reward_lost_is_a_breach_and_none_lost_is_good():
    stable = [1.0] * 40 + [0.0] * 24
    assert judge_rewards(CONFIG, stable, stable).kind == "good"
    lost = judge_rewards(CONFIG, stable, [1.0] * 20 + [0.0] * 44)
    assert lost.kind == "breach"
    # 20 / 64 and 40 / 64
    assert lost.reason == "reward: 64 probes earn 0.312 by the canary, 0.625 by stable; at most 5.0% may be lost"


@pytest.mark.parametrize(
    ("stable", "canary", "words"),
    [
        ([], [], "at least 1 task, got none"),
        ([1.0], [1.0, 0.0], "must come in pairs, got 1 and 2"),
        ([1.0], [float("nan")], "within 0 and 1, got nan"),
        ([2.0], [1.0], "within 0 and 1, got 2"),
    ],
)
def test_rewards_that_cannot_be_compared_are_refused(stable, canary, words):
    with pytest.raises(UserError, match=words):
        judge_rewards(CONFIG, stable, canary)


def test_the_error_probability_is_spent_over_steps_tests_and_windows():
    config = CanaryConfig(shares=(0.1, 0.5), error_probability=0.06)
    # 2 steps, 3 tests: 0.01 each; windows take a half, a sixth, a twelfth, ... of it, together all
    assert math.exp(-threshold(config, 0)) == pytest.approx(0.01 / 2)
    assert math.exp(-threshold(config, 1)) == pytest.approx(0.01 / 6)
    assert sum(math.exp(-threshold(config, restarts)) for restarts in range(10**4)) == pytest.approx(0.01, rel=1e-3)
