import numpy as np
import pytest

from core.config import GroupingConfig
from grouping.judgement import ScoredGroup, checked_groups, judge_groups, step_metrics
from grouping.pools import Pool

pytestmark = pytest.mark.fast

PAST = Pool(mean=0.5, within=0.2, between=0.0, mean_noise=0.0, num_prompts=9, weight=9.0)  # w at n>1: the cap
RIGHT, MIXED = np.ones(4), np.array([1.0, 0.0, 0.0, 0.0])


def judge(history: dict[int, Pool], labels: list[int], rewards: list[np.ndarray] | None = None, **fields: object):
    rewards = rewards or [RIGHT, MIXED]
    prompts = [str(i) for i in range(len(rewards))]
    return judge_groups(GroupingConfig(**fields), rewards, prompts, np.array(labels), history)


def test_the_prompt_baseline_ignores_clusters() -> None:
    right, mixed = judge({0: PAST}, [0, 0], baseline="prompt", prompt_form="dr_grpo")
    assert right.advantages.tolist() == [0.0] * 4
    assert mixed.advantages.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert (mixed.weight, right.zero_variance, mixed.zero_variance) == (0.0, True, False)


def test_past_steps_come_before_other_prompts_of_this_step() -> None:
    right, mixed = judge({0: PAST}, [0, 0])
    # w = 0.8: right 0.8*(1 - 0.5); mixed: siblings' means 0 and 1/3, b = 0.4 and 0.2/3 + 0.4
    assert right.advantages.tolist() == pytest.approx([0.4] * 4)
    assert mixed.advantages.tolist() == pytest.approx([0.6] + [-0.2 / 3 - 0.4] * 3)


@pytest.mark.parametrize("past", [{}, {0: Pool(0.9, 0.2, None, 0.1, 1, 5.0)}, {0: Pool(0.9, 0.2, 0.0, 0.1, 9, 0.5)}])
def test_without_enough_past_the_other_prompts_of_the_step_are_used(past: dict[int, Pool]) -> None:
    one = [np.array([1.0]), np.array([0.0, 1.0]), np.array([1.0, 1.0])]
    first, _, _ = judge(past, [0, 0, 0], one)
    # a group of one against the mean of the other prompts' means, (0.5 + 1)/2
    assert first.advantages.tolist() == [0.25]


def test_alone_in_its_cluster_or_set_aside_a_group_falls_back_to_its_siblings() -> None:
    for labels in ([0, 1], [-1, -1]):
        right, mixed = judge({7: PAST, -1: PAST}, labels)
        assert right.advantages.tolist() == [0.0] * 4
        assert mixed.advantages.tolist() == pytest.approx([1.0] + [-1 / 3] * 3)
        assert mixed.weight == 0.0


@pytest.mark.parametrize(("option", "first", "keep"), [("keep", 0.4, True), ("cap", 0.25, True), ("drop", 0.4, False)])
def test_groups_without_variance_are_kept_capped_or_dropped(option: str, first: float, keep: bool) -> None:
    right, mixed = judge({0: PAST}, [0, 0], zero_variance=option)
    assert right.advantages.tolist() == pytest.approx([first] * 4)
    assert right.keep is keep
    assert mixed.keep
    metrics = step_metrics([RIGHT, MIXED], [right, mixed])
    assert metrics["zero_variance_share"] == 0.5
    assert metrics["groups_dropped_zero_variance"] == float(not keep)
    assert metrics["reward_mean"] == 5 / 8


def test_capping_keeps_the_sign() -> None:
    (wrong,) = judge({0: PAST}, [0], [np.zeros(4)], zero_variance="cap", zero_variance_cap=0.1)
    assert wrong.advantages.tolist() == [-0.1] * 4


@pytest.mark.parametrize(("option", "multiplier"), [("keep", 1.0), ("cap", 0.9875), ("drop", 0.925)])
def test_only_keep_is_unbiased(option: str, multiplier: float) -> None:
    """n=4, w=.6, mu=.5, p=.5. A zero-variance group has |A| = .3 and carries 2 * .5^4 * .3/.5 = .075 of the gradient;
    a cap of .25 leaves .0625 of it, drop nothing."""
    total = 0.0
    for k in range(16):
        rewards = np.array([float(k >> i & 1) for i in range(4)])
        (group,) = judge({0: PAST}, [0], [rewards], zero_variance=option, max_shrinkage=0.6)
        if group.keep:
            total += np.mean(group.advantages * np.where(rewards > 0, 2.0, -2.0)) / 16
    assert total == pytest.approx(multiplier, abs=1e-12)


def test_every_reward_equal_for_a_whole_step_is_all_zero_and_counted() -> None:
    config_rewards = [np.full(4, -3.7)] * 3
    for baseline in ("prompt", "global", "semantic"):
        judged = judge({}, [0, 0, 1], config_rewards, baseline=baseline)
        assert not np.concatenate([item.advantages for item in judged]).any()
        assert step_metrics(config_rewards, judged)["zero_variance_share"] == 1.0


def scored(group_id: str, rewards: list[float]) -> ScoredGroup:
    return ScoredGroup(group_id, group_id, "text", 0, np.array(rewards))


def test_groups_are_taken_in_the_order_of_their_ids() -> None:
    checked = checked_groups([scored("0:b:0", [1.0]), scored("0:a:0", [0.0])])
    assert [group.group_id for group, _ in checked] == ["0:a:0", "0:b:0"]


def test_a_step_that_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        checked_groups([])
    with pytest.raises(ValueError, match="unique in a step, got 0:a:0 twice"):
        checked_groups([scored("0:a:0", [1.0]), scored("0:a:0", [0.0])])
    with pytest.raises(ValueError, match=r"got inf \(group 0:a:0, sample 1\)"):
        checked_groups([scored("0:a:0", [1.0, np.inf])])
