"""Each check on series made sick, on the same series healthy, and every cure as a config that loads."""

import inspect
from typing import Any

import pytest

from core.config import Config, dump_config, parse_config
from core.config_text import apply_override
from core.evaluations import Evaluation
from core.watch.checks import CHECKS, examine
from core.watch.finding import Cure, Finding
from core.watch.history import History
from core.watch.learning import heldout_decline, reward_volatility

pytestmark = pytest.mark.fast
# 16 prompts: with a standard deviation of 0.4 a step's mean has a spread of at most 0.4 / 4 = 0.1.
CONFIG = Config(num_steps=40, prompts_per_step=16)
HEALTHY: dict[str, Any] = {
    "reward_mean": 0.5,
    "reward_std": 0.4,
    "entropy": 1.2,
    "distinct_share": 0.8,
    "distinct_2": 0.5,
    "zero_variance_share": 0.4,
    "advantage_abs_mean": 0.3,
    "mean_abs_logprob_difference": 0.02,
    "importance_truncated_share": 0.0,
    "truncated_share": 0.1,
    "answer_tokens_mean": 9.0,
    "tfidf_lift": 0.8,
    "icc": 0.3,
    "tau2": 0.07,
    "tau2_global": 0.1,
    "num_clusters": 8.0,
    "cluster_size_max": 80.0,
    "texts_known": 400.0,
    "memory_used_share": 0.5,
    "memory_learner_bytes": 5 * 2**30,
    "memory_rollout_engine_bytes": 2 * 2**30,
    "seconds": 10.0,
    "rollout_s": 4.0,
    "learner_s": 5.0,
    "grouping_s": 0.1,
    "weights_s": 0.8,
    "weight_update_pause_s": 0.4,
    "workers_replaced": 0,
}
SICK = {  # check -> (steps of before, what the last steps hold instead)
    "reward_volatile": (0, {"reward_mean": [0.2, 0.8] * 10}),
    "outputs_conservative": (20, {"entropy": [0.1] * 20, "distinct_share": [0.2] * 20, "distinct_2": [0.05] * 20}),
    "groups_uninformative": (0, {"zero_variance_share": [0.9] * 6, "reward_mean": [0.05] * 6}),
    "sampler_mismatch": (20, {"mean_abs_logprob_difference": [0.06] * 5}),
    "answers_truncated": (0, {"truncated_share": [0.6] * 12}),
    "topics_fading": (10, {"tfidf_lift": [0.3]}),
    "difficulty_unexplained": (20, {"icc": [0.0] * 10}),
    "clusters_lopsided": (0, {"cluster_size_max": [240.0] * 5}),
    "labels_churning": (0, {"label_churn": [0.6, None, 0.7, None]}),
    "memory_short": (5, {"memory_used_share": [0.92]}),
    "workers_dying": (5, {"workers_replaced": [1, 1, 2, 3]}),
    "pause_long": (0, {"weight_update_pause_s": [3.0] * 5}),
    "phase_dominates": (0, {"grouping_s": [4.0] * 5}),
}


def history(num_before: int, changed: dict[str, list[Any]], config: Config = CONFIG, **more: Any) -> History:
    """`num_before` healthy steps, then as many as `changed` has values."""
    num_changed = max((len(values) for values in changed.values()), default=0)
    rows = [{"step": step, **HEALTHY} for step in range(num_before + num_changed)]
    for key, values in changed.items():
        for row, value in zip(rows[num_before:], values, strict=False):
            row[key] = value
    return History(config, rows, **more)


def evaluations(*accuracies: float, num_prompts: int = 64) -> list[Evaluation]:
    return [Evaluation(8 * k, value, num_prompts, round(value * num_prompts), []) for k, value in enumerate(accuracies)]


def found(run: History) -> list[str]:
    return [finding.check for finding in examine(run)]


def test_nothing_is_found_in_a_run_of_any_length_that_is_well():
    for num_steps in (0, 1, 4, 5, 9, 10, 15, 40, 200):
        assert found(history(num_steps, {}, evaluations=evaluations(0.3, 0.5, 0.55, 0.52))) == []


def test_nothing_is_found_where_no_metric_is_known():
    assert found(History(CONFIG, [{"step": step} for step in range(40)])) == []
    assert found(History(CONFIG, [{"step": k, **dict.fromkeys(HEALTHY, None)} for k in range(40)])) == []
    assert found(History(CONFIG, [{"step": k, **dict.fromkeys(HEALTHY, "nan")} for k in range(40)])) == []


@pytest.mark.parametrize("check", sorted(SICK))
def test_a_sick_series_is_found_by_its_own_check_and_by_no_other(check):
    assert found(history(*SICK[check])) == [check]


def test_every_check_has_a_sick_series_and_says_how_it_is_called():
    names = [check.__name__ for check in CHECKS]
    assert sorted(names) == sorted([*SICK, "heldout_declining"])
    assert all(inspect.getdoc(check) for check in CHECKS)


@pytest.mark.parametrize("check", sorted([*SICK, "heldout_declining"]))
def test_each_cure_is_a_word_that_a_config_takes_and_that_changes_it(check):
    sick = history(*SICK[check]) if check in SICK else history(40, {}, evaluations=evaluations(0.3, 0.9, 0.5, 0.5))
    (finding,) = examine(sick)
    assert finding.cures
    assert all(cure.value != cure.now for cure in finding.cures)
    for cure in finding.cures:
        tree = CONFIG.model_dump(mode="json")
        apply_override(tree, cure.word, Config)
        assert dump_config(parse_config(tree, "cured")) != dump_config(CONFIG)
        assert f"{cure.word} (now " in finding.text()


def test_volatility_is_one_where_the_mean_moves_as_the_draw_of_prompts_explains():
    # Differences of +-0.1 * sqrt(2), root mean square over sqrt(2) = 0.1, expected 0.4 / sqrt(16) = 0.1.
    step = 0.1 * 2**0.5
    means = [0.5 + step * (k % 2) for k in range(20)]
    assert reward_volatility(history(0, {"reward_mean": means})) == pytest.approx(1.0)
    rising = [0.02 * k for k in range(20)]  # differences of 0.02 / sqrt(2) against 0.1
    assert reward_volatility(history(0, {"reward_mean": rising})) == pytest.approx(0.02 / 2**0.5 / 0.1)
    assert reward_volatility(history(9, {})) is None
    assert reward_volatility(history(20, {"reward_std": [0.0] * 20, "reward_mean": [0.0] * 20})) is None


def test_only_the_last_steps_count_for_volatility():
    assert found(history(0, {"reward_mean": [0.2, 0.8] * 10 + [0.5] * 20})) == []


def test_a_policy_that_repeats_itself_and_still_gains_or_is_right_is_no_trouble():
    before, sick = SICK["outputs_conservative"]
    assert "outputs_conservative" not in found(history(before, sick | {"reward_mean": [0.03 * k for k in range(20)]}))
    assert "outputs_conservative" not in found(history(before, sick | {"reward_mean": [0.95] * 20}))
    assert "outputs_conservative" not in found(history(before, sick | {"distinct_share": [0.6] * 20}))


def test_a_decline_needs_two_low_evaluations_or_one_far_below():
    # 64 prompts, 0.9 against 0.6: sqrt(0.9 * 0.1 / 64 + 0.6 * 0.4 / 64) = 0.072, so 4.2 errors; halved for one: 2.1.
    assert heldout_decline(History(CONFIG, [], evaluations(0.9, 0.6))) == pytest.approx(2.1, abs=0.1)
    # Twice: sqrt(0.9 * 0.1 / 64 + 0.6 * 0.4 / 128) = 0.057, so 5.2 errors.
    assert heldout_decline(History(CONFIG, [], evaluations(0.9, 0.6, 0.6))) == pytest.approx(5.2, abs=0.3)
    for calm in ((0.9,), (0.3, 0.9), (0.9, 0.8), (0.6, 0.55, 0.55), (0.5, 0.6, 0.5, 0.6)):
        assert found(History(CONFIG, [], evaluations(*calm))) == []
    assert found(History(CONFIG, [], evaluations(0.9, 0.6, 0.6, num_prompts=4))) == []  # of four prompts: chance
    assert found(History(CONFIG, [], evaluations(1.0, 0.0))) == ["heldout_declining"]


def test_a_decline_names_the_checkpoint_from_before_it_or_asks_to_keep_more():
    run = History(CONFIG, [], evaluations(0.3, 0.9, 0.5, 0.5), checkpoints=(24, 8, 4))
    (finding,) = examine(run)
    assert "step 8" in finding.advice
    (finding,) = examine(History(CONFIG, [], evaluations(0.3, 0.9, 0.5, 0.5), checkpoints=(24, 16)))
    assert finding.advice == ""
    assert Cure("checkpoint.keep", 5, 2) in finding.cures


def test_groups_without_signal_are_worse_without_any_advantage_and_harmless_when_all_is_solved():
    changed = {"zero_variance_share": [1.0] * 5, "reward_mean": [0.0] * 5, "advantage_abs_mean": [0.0] * 5}
    assert [(one.check, one.severity) for one in examine(history(0, changed))] == [("groups_uninformative", "critical")]
    (solved,) = examine(history(0, changed | {"reward_mean": [1.0] * 5}))
    assert (solved.severity, solved.cures[0].key) == ("note", "data.arithmetic.max_operand")
    assert "new run_dir" in solved.text()


def test_groups_without_signal_after_better_ones_are_a_policy_that_broke():
    broken = {"zero_variance_share": [0.4] * 5 + [1.0] * 5, "reward_mean": [0.3] * 5 + [0.0] * 5}
    (finding,) = examine(history(0, broken))
    assert finding.cures[0].key == "learner.learning_rate"
    assert "0.30 before" in finding.seen
    (finding,) = examine(history(0, {"zero_variance_share": [1.0] * 10, "reward_mean": [0.05] * 10}))
    assert finding.cures[0].key == "rollout.temperature"


def test_a_share_of_cut_answers_that_falls_is_a_policy_that_learns_to_stop():
    falling = [0.9] * 5 + [0.7] * 5 + [0.5] * 5
    assert found(history(0, {"truncated_share": falling})) == []
    assert found(history(0, {"truncated_share": falling[::-1]})) == ["answers_truncated"]


def test_mismatch_is_judged_by_its_growth_its_size_and_the_truncated_weights():
    assert found(history(10, {"mean_abs_logprob_difference": [0.045] * 5})) == []  # doubled, but small
    assert found(history(0, {"mean_abs_logprob_difference": [0.1] * 20})) == []  # large, but as it was
    assert found(history(0, {"mean_abs_logprob_difference": [0.2] * 5})) == ["sampler_mismatch"]
    assert found(history(0, {"importance_truncated_share": [0.1] * 5})) == ["sampler_mismatch"]
    cut = parse_config({"num_steps": 4, "rollout": {"top_p": 0.9}}, "here")
    (finding,) = examine(history(0, {"mean_abs_logprob_difference": [0.2] * 5}, cut))
    assert finding.cures[0] == Cure("rollout.top_p", 1.0, 0.9)


def test_clusters_are_judged_only_where_the_baseline_goes_by_them():
    config = parse_config({"num_steps": 40, "prompts_per_step": 16, "grouping": {"baseline": "global"}}, "here")
    for check in ("topics_fading", "difficulty_unexplained", "clusters_lopsided", "labels_churning"):
        assert found(history(*SICK[check], config)) == []


def test_memory_is_critical_where_ray_begins_to_kill_and_names_who_holds_most():
    (finding,) = examine(history(5, {"memory_used_share": [0.96]}))
    assert (finding.severity, finding.cures[0].key) == ("critical", "learner.max_tokens_per_micro_batch")
    assert "learner (5.0 GiB)" in finding.seen
    (finding,) = examine(history(5, {"memory_used_share": [0.96], "memory_rollout_engine_bytes": [9 * 2**30]}))
    assert finding.cures[0].key == "rollout.kv_cache_bytes"
    assert found(history(0, {"memory_used_share": [0.99, *[0.5] * 5]})) == []  # long past


def test_workers_replaced_before_a_new_start_count_and_a_new_start_is_no_replacement():
    assert found(history(0, {"workers_replaced": [0, 2, 0, 1]})) == ["workers_dying"]
    assert found(history(0, {"workers_replaced": [5, 5, 0, 0]})) == []


def test_the_worst_finding_comes_first():
    run = history(0, {"weight_update_pause_s": [3.0] * 6, "memory_used_share": [0.97] * 6, "tfidf_lift": [0.8, 0.1]})
    run.steps[-1]["tfidf_lift"] = 0.1
    assert [one.severity for one in examine(run)] == ["critical", "warning", "note"]


def test_a_finding_reads_as_one_line():
    finding = Finding("pause_long", "note", "seen", (Cure("prompts_per_step", 16, 8),), "look there")
    assert finding.text() == "note: pause_long: seen; set prompts_per_step=16 (now 8, needs a new run_dir); look there"
