"""The paired comparison: its bound is honest at every size, and it says what it would take."""

import math

import numpy as np
import pytest

from core.errors import UserError
from serve.gate.paired import compare

pytestmark = pytest.mark.fast


def pairs(both: int, lost: int, gained: int, neither: int) -> tuple[list[float], list[float]]:
    """Binary rewards of the full model and of the candidate, from the four counts."""
    full = [1.0] * (both + lost) + [0.0] * (gained + neither)
    candidate = [1.0] * both + [0.0] * lost + [1.0] * gained + [0.0] * neither
    return full, candidate


def bound(both: int, lost: int, gained: int, neither: int, confidence: float = 0.95) -> float:
    return compare(*pairs(both, lost, gained, neither), confidence, 0.01).upper_bound


def test_the_loss_is_relative_to_the_full_model():
    found = compare(*pairs(both=45, lost=5, gained=0, neither=50), 0.95, 0.01)
    # 50 of 100 against 45 of 100: (0.50 - 0.45) / 0.50
    assert (found.full_reward, found.candidate_reward) == (0.5, 0.45)
    assert found.relative_loss == pytest.approx(0.1)


# One-sided 95 % upper bounds of a Poisson count (Garwood 1936): what the exact bound of rare losses tends to.
@pytest.mark.parametrize(("lost", "exact"), [(0, 2.996), (1, 4.744), (2, 6.296), (5, 10.513), (10, 16.962)])
def test_rare_losses_have_the_bound_of_a_poisson_count(lost, exact):
    num = 20_000
    count = bound(both=num - lost, lost=lost, gained=0, neither=0) * num
    assert 0.995 * exact < count < 1.1 * exact


def test_no_loss_seen_among_few_tasks_is_no_proof():
    # (1 - x)^64 = 0.05 at x = 0.0457: 64 right answers cannot exclude that 1 in 22 goes wrong
    assert bound(both=64, lost=0, gained=0, neither=0) > 0.0457


@pytest.mark.parametrize("num", [16, 64, 256])
@pytest.mark.parametrize(
    ("share_full", "lost", "gained"),
    [(0.2, 0.3, 0.05), (0.65, 0.02, 0.0), (0.65, 0.1, 0.1), (0.9, 0.05, 0.2), (1.0, 0.01, 0.0), (1.0, 0.3, 0.0)],
)
def test_the_bound_covers_the_true_loss_as_often_as_it_says(num, share_full, lost, gained):
    generator = np.random.default_rng(7)
    truth = lost - gained * (1 - share_full) / share_full
    cells = [share_full * (1 - lost), share_full * lost, (1 - share_full) * gained, (1 - share_full) * (1 - gained)]
    num_draws = 600
    misses = sum(bound(*counts) < truth for counts in generator.multinomial(num, cells, num_draws).tolist())
    # 5 % of misses are allowed; three standard errors above them are 0.05 + 3 sqrt(0.05 * 0.95 / 600) = 0.077
    assert misses / num_draws <= 0.077


def test_the_bound_covers_real_rewards_too():
    generator = np.random.default_rng(11)
    num_draws, misses = 600, 0
    for _ in range(num_draws):
        full = generator.beta(2, 1, 64)  # mean 2/3
        kept = generator.random(64) > 0.1  # a tenth of the answers loses all: the true loss is 0.1
        misses += compare(full.tolist(), (full * kept).tolist(), 0.95, 0.01).upper_bound < 0.1
    assert misses / num_draws <= 0.077


def test_a_model_against_itself_passes_once_there_are_enough_tasks():
    few, many = pairs(64, 0, 0, 0), pairs(400, 0, 0, 0)
    asked = compare(*few, 0.95, 0.01)
    assert asked.upper_bound > 0.01
    assert asked.needed_tasks is not None
    assert compare(*many, 0.95, 0.01).upper_bound < 0.01
    assert 299 <= asked.needed_tasks <= 400  # (1 - 0.01)^299 = 0.05: no fewer can do


def test_the_needed_tasks_are_just_enough():
    # A loss of 1 in 200 tasks, under a limit of 2 %
    found = compare(*pairs(199, 1, 0, 0), 0.95, 0.02)
    assert found.needed_tasks is not None
    num = math.ceil(found.needed_tasks / 200) * 200  # the same shares, in whole tasks
    lost = num // 200
    assert compare(*pairs(num - lost, lost, 0, 0), 0.95, 0.02).upper_bound < 0.02
    lost -= 1
    num = lost * 200
    assert compare(*pairs(num - lost, lost, 0, 0), 0.95, 0.02).upper_bound >= 0.02


def test_a_loss_beyond_the_limit_needs_no_more_tasks():
    assert compare(*pairs(95, 5, 0, 0), 0.95, 0.01).needed_tasks is None


def test_a_model_that_earns_nothing_is_no_yardstick():
    found = compare([0.0] * 50, [1.0] * 50, 0.95, 0.01)
    assert (found.relative_loss, found.upper_bound, found.needed_tasks) == (None, 1.0, None)


def test_a_higher_confidence_gives_a_higher_bound():
    assert bound(90, 1, 0, 9, confidence=0.99) > bound(90, 1, 0, 9, confidence=0.9)


@pytest.mark.parametrize(
    ("full", "candidate", "words"),
    [
        ([1.0], [1.0], "at least 2 pairs, got 1 and 1"),
        ([1.0, 0.0], [1.0], "at least 2 pairs, got 2 and 1"),
        ([1.0, float("nan")], [1.0, 1.0], "within 0 and 1"),
        ([1.0, 3.5], [1.0, 1.0], r"within 0 and 1 to be compared, got 3\.5"),
    ],
)
def test_rewards_that_cannot_be_compared_are_refused(full, candidate, words):
    with pytest.raises(UserError, match=words):
        compare(full, candidate, 0.95, 0.01)
