"""The numbers of a run: one object a step for metrics.jsonl, one object a run for summary.json."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actors.flow import Scored
from core.config import Config
from core.errors import RunBroken
from core.evaluations import EVALUATIONS, read_evaluations
from core.metrics import read_metrics, write_summary


def step_metrics(
    step: int,
    version: int,
    groups: Sequence[Scored],
    grouping: Mapping[str, float],
    learner: Mapping[str, float],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """The line of metrics.jsonl for one step: every part's numbers, and the seconds of each phase."""
    rewards = np.concatenate([item.rewards for item in groups])
    num_samples = sum(item.info.num_samples for item in groups)
    num_tokens = sum(item.info.num_tokens for item in groups)
    num_distinct = sum(item.info.num_distinct for item in groups)
    slowest_s = max(item.info.seconds for item in groups)
    return {
        "step": step,
        "version": version,
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "answer_tokens_mean": num_tokens / num_samples,
        "truncated_share": sum(item.info.num_truncated for item in groups) / num_samples,
        "distinct_share": num_distinct / num_samples,
        "new_answers_share": (num_distinct - len(groups)) / max(1, num_samples - len(groups)),
        "distinct_1": _mean([item.info.distinct_1 for item in groups]),
        "distinct_2": _mean([item.info.distinct_2 for item in groups]),
        "samples": num_samples,
        "rollout_tokens": num_tokens,
        "rollout_tokens_per_s": num_tokens / slowest_s if slowest_s > 0 else 0.0,
        **{name: value for name, value in grouping.items() if name not in ("reward_mean", "seconds")},
        **{name: value for name, value in learner.items() if name != "seconds"},
        **seconds,
    }


def summarize(run_dir: Path, config: Config, peak_memory_bytes: Mapping[str, int]) -> dict[str, Any]:
    """What summary.json now holds; from the run folder's own files, so that a resumed run counts whole."""
    steps = read_metrics(run_dir)
    evaluations = read_evaluations(run_dir)
    if not evaluations:
        raise RunBroken(
            f"{run_dir / EVALUATIONS} must hold the run's evaluations, got none; was it moved while training?"
        )
    summary = {
        "steps": len(steps),
        "prompts_per_step": config.prompts_per_step,
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "heldout_prompts": evaluations[-1].num_prompts,
        "heldout_accuracy_before": evaluations[0].accuracy,
        "heldout_accuracy_after": evaluations[-1].accuracy,
        "seconds_per_step_median": _median(steps, "seconds"),
        "rollout_tokens_per_s": _median(steps, "rollout_tokens_per_s"),
        "learner_tokens_per_s": _median(steps, "learner_tokens_per_s"),
        "samples_trained": sum(line.get("groups_trained", 0) for line in steps) * config.rollout.samples_per_prompt,
        "groups_trained": sum(line.get("groups_trained", 0) for line in steps),
        "groups_dropped": sum(line.get("groups_dropped", 0) for line in steps),
        "weight_update_pause_s_median": _median(steps, "weight_update_pause_s"),
        "mean_abs_logprob_difference": _median(steps, "mean_abs_logprob_difference"),
        "recomputes": _last(steps, "recomputes"),
        "num_clusters": _last(steps, "num_clusters"),
        "peak_memory_bytes": dict(peak_memory_bytes),
    }
    write_summary(run_dir, summary)
    return summary


def _mean(values: Sequence[float]) -> float:
    """The mean of those that are numbers: a group of empty answers has no pairs of tokens."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _median(lines: Iterable[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return statistics.median(values) if values else None


def _last(lines: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)
