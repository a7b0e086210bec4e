"""The alert rules under promtool: each fires on a sick series, none on a healthy one; and they match the checks.

Needs Debian's package `prometheus`.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.prometheus import ALERTS, scrape_config
from core.config import Config
from core.watch import clusters, learning, resources
from core.watch.checks import CHECKS
from core.watch.finding import SEVERITIES

pytestmark = pytest.mark.process
RULES = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
MINUTES = 120  # of each series, a value a minute
HEALTHY = {
    "step": "0+1x120",
    "seconds": "60x120",
    "reward_mean": "0.1+0.005x120",
    "reward_volatility": "0.9x120",
    "heldout_accuracy": "0.5x120",
    "heldout_decline": "0.5x120",
    "entropy": "2-0.01x120",
    "new_answers_share": "1-0.005x120",
    "zero_variance_share": "0.6x120",
    "mean_abs_logprob_difference": "0.04-0.0002x120",
    "importance_truncated_share": "0x120",
    "truncated_share": "0.9-0.006x120",
    "tfidf_lift": "0.8x120",
    "icc": "0.3x120",
    "num_clusters": "8x120",
    "cluster_size_max": "80x120",
    "texts_known": "400x120",
    "label_churn": "0.25x120",
    "memory_used_share": "0.5x120",
    "workers_replaced": "0x30 1x90",
    "rollout_s": "20x120",
    "learner_s": "30x120",
    "grouping_s": "1x120",
    "weights_s": "6x120",
    "weight_update_pause_s": "3x120",
}
SICK = {
    "MemoryShort": {"memory_used_share": "0.5x60 0.92x60"},
    "MemoryNearlyGone": {"memory_used_share": "0.5x60 0.96x60"},
    "WorkersDying": {"workers_replaced": "0x70 1x10 3x10 5x30"},
    "GroupsUninformative": {"zero_variance_share": "0.6x60 0.9x60"},
    "RewardVolatile": {"reward_volatility": "1x60 2.5x60"},
    "OutputsConservative": {
        "entropy": "2-0.03x60 0.2x60",
        "new_answers_share": "1-0.015x60 0.1x60",
        "reward_mean": "0.1+0.005x60 0.4x60",
    },
    "HeldoutDeclining": {"heldout_decline": "0x100 2.5x20"},
    "SamplerMismatch": {"mean_abs_logprob_difference": "0.02x60 0.06x60"},
    "AnswersTruncated": {"truncated_share": "0.5x120"},
    "TopicsFading": {"tfidf_lift": "0.8x60 0.3x60"},
    "DifficultyUnexplained": {"icc": "0.3x60 0.01x60"},
    "ClustersLopsided": {"cluster_size_max": "80x60 240x60"},
    "LabelsChurning": {"label_churn": "0.2x60 0.7x60"},
    "PauseLong": {"weight_update_pause_s": "3x60 20x60"},
    "PhaseDominates": {"grouping_s": "1x60 30x60"},
    "RunStalled": {"step": "0+1x60 60x60"},
}
IMPLIED = {"MemoryNearlyGone": {"MemoryShort"}}  # what else is firing, and rightly


def promtool(*words: str | Path) -> str:
    program = shutil.which("promtool")
    assert program, "the alerts' tests need promtool, got none; apt-get install prometheus"
    ended = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def case(changed: dict[str, str], firing: set[str]) -> dict[str, Any]:
    """One of promtool's tests: a run's series, and the names of all alerts that fire at their end."""
    series = {f'ray_grpo_train_{name}{{run="demo"}}': values for name, values in (HEALTHY | changed).items()}
    series |= {'ray_node_mem_used{instance="a:1"}': "8x120", 'ray_node_mem_total{instance="a:1"}': "16x120"}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }


def test_promtool_takes_the_rules_and_the_configuration_that_names_them(tmp_path):
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS)
    (tmp_path / "nodes.json").write_text("[]")
    (tmp_path / "prometheus.yml").write_text(scrape_config(tmp_path / "nodes.json"))
    assert f"{len(RULES)} rules found" in promtool("check", "config", tmp_path / "prometheus.yml")


def test_each_alert_fires_on_its_sick_series_and_none_on_a_healthy_one(tmp_path):
    node = case({}, {"NodeMemoryShort"})
    node["input_series"][-2]["values"] = "8x60 15x60"  # 15 of 16
    cases = [case({}, set()), node]
    cases += [case(changed, {name} | IMPLIED.get(name, set())) for name, changed in SICK.items()]
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yaml")
    assert {*SICK, "NodeMemoryShort"} == {rule["alert"] for rule in RULES}


def test_an_alert_says_whose_run_it_is_the_number_and_what_to_change(tmp_path):
    told = case({"reward_volatility": "1x60 2.5x60"}, {"RewardVolatile"})
    told["alert_rule_test"] = [
        {
            "alertname": "RewardVolatile",
            "eval_time": f"{MINUTES}m",
            "exp_alerts": [
                {
                    "exp_labels": {"run": "demo", "severity": "warning", "check": "reward_volatile"},
                    "exp_annotations": {
                        "summary": "demo: the reward moves 2.5 times as much as the draw explains",
                        "change": "halve learner.learning_rate, then learner.max_grad_norm",
                    },
                }
            ],
        }
    ]
    tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [told]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yaml")


def test_every_check_of_the_doctor_has_an_alert_and_every_alert_names_a_real_key():
    assert {rule["labels"]["check"] for rule in RULES} == {check.__name__ for check in CHECKS} | {"run_stalled"}
    assert {rule["labels"]["severity"] for rule in RULES} == set(SEVERITIES)
    for rule in RULES:
        keys = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b|prompts_per_step", rule["annotations"]["change"])
        assert keys, rule
        for key in keys:
            section: Any = Config(num_steps=1)
            for part in key.split("."):
                section = getattr(section, part)


@pytest.mark.parametrize(
    ("alert", "thresholds"),
    [
        ("MemoryShort", [resources.MAX_MEMORY]),
        ("MemoryNearlyGone", [resources.MAX_MEMORY_CRITICAL]),
        ("NodeMemoryShort", [resources.MAX_MEMORY]),
        ("WorkersDying", [resources.MAX_REPLACED]),
        ("GroupsUninformative", [learning.MAX_ZERO_VARIANCE]),
        ("RewardVolatile", [learning.MAX_VOLATILITY]),
        ("OutputsConservative", [round(learning.MAX_DIVERSITY_LEFT, 3), learning.NEAR_BEST]),
        ("HeldoutDeclining", [learning.MAX_DECLINE]),
        (
            "SamplerMismatch",
            [
                learning.MAX_MISMATCH,
                learning.MISMATCH_GROWTH,
                learning.MIN_MISMATCH_GROWN,
                learning.MAX_IMPORTANCE_TRUNCATED,
            ],
        ),
        ("AnswersTruncated", [learning.MAX_TRUNCATED, learning.TRUNCATED_LEFT]),
        ("TopicsFading", [clusters.LIFT_LEFT]),
        ("DifficultyUnexplained", [clusters.ICC_LEFT, clusters.MIN_ICC_THEN]),
        ("ClustersLopsided", [clusters.MAX_LARGEST, clusters.MIN_CLUSTERS]),
        ("LabelsChurning", [clusters.MAX_CHURN]),
        ("PauseLong", [resources.MAX_PAUSE]),
        ("PhaseDominates", sorted(set(resources.MAX_PHASE.values()))),
    ],
)
def test_an_alerts_thresholds_are_those_of_its_check(alert, thresholds):
    (rule,) = (rule for rule in RULES if rule["alert"] == alert)
    numbers = {float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", rule["expr"])}
    assert numbers >= set(map(float, thresholds)), rule["expr"]
