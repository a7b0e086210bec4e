"""What a run folder holds, read for the report: whatever is there of it, from a finished, a killed or a young run."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from core.console import finite
from core.errors import UserError
from core.evaluations import EVALUATIONS
from core.metrics import METRICS, SUMMARY, read_metrics

CONFIG = "config.yaml"
CLUSTERS = "clusters.json"
_Z = 1.959964  # of the normal distribution's 97.5th percentile: a two-sided 95% interval


@dataclass(frozen=True)
class RunRecord:
    """One run folder's content; a file that is missing leaves its field empty."""

    name: str
    metrics: list[dict[str, Any]]  # one a step, in order
    evaluations: list[dict[str, Any]]  # by step; the newest of a step
    summary: dict[str, Any]
    config_text: str
    config: dict[str, Any]
    clusters: dict[str, Any]
    notes: list[str] = field(default_factory=list)  # what could not be read, one sentence each

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it is a finite number."""
        return _series(self.metrics, key)

    def accuracies(self) -> tuple[list[int], list[float]]:
        """Steps and held-out accuracies: of the evaluations, or of the metrics where there are none."""
        steps, values = _series(self.evaluations, "accuracy")
        return (steps, values) if steps else self.series("heldout_accuracy")


def read_run(run_dir: Path) -> RunRecord:
    """The RunRecord of a folder. Raises UserError for a folder that is missing or holds no run."""
    if not run_dir.is_dir():
        raise UserError(f"run folder must be an existing folder, got {run_dir}")
    if not any((run_dir / name).is_file() for name in (METRICS, SUMMARY, CONFIG, EVALUATIONS)):
        raise UserError(
            f"run folder must hold {METRICS} or {CONFIG}, got neither in {run_dir}; name the run's own folder"
        )
    notes: list[str] = []
    config_text = _text(run_dir / CONFIG)
    return RunRecord(
        name=run_dir.resolve().name,
        metrics=read_metrics(run_dir),
        evaluations=_evaluations(run_dir / EVALUATIONS, notes),
        summary=_object(run_dir / SUMMARY, notes),
        config_text=config_text,
        config=_config(config_text, notes),
        clusters=_object(run_dir / CLUSTERS, notes),
        notes=notes,
    )


def wilson_interval(correct: float, num_prompts: float) -> tuple[float, float]:
    """The 95% interval of a binomial share (Wilson 1927): inside 0..1 and not empty at 0 or at all correct."""
    share = correct / num_prompts
    square = _Z**2 / num_prompts
    centre = share + square / 2
    spread = _Z * math.sqrt(share * (1 - share) / num_prompts + square / (4 * num_prompts))
    return max(0.0, (centre - spread) / (1 + square)), min(1.0, (centre + spread) / (1 + square))


def interval_of(evaluation: dict[str, Any]) -> tuple[float, float] | None:
    """The 95% interval of an evaluation's accuracy; None where it does not say of how many prompts."""
    accuracy, number = finite(evaluation.get("accuracy")), finite(evaluation.get("num_prompts"))
    if accuracy is None or number is None or number < 1 or not 0 <= accuracy <= 1:
        return None
    return wilson_interval(accuracy * number, number)


def thinned(rows: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most about `limit` of the rows, evenly spaced, with the first and the last."""
    if len(rows) <= limit:
        return list(rows)
    chosen = sorted({round(k * (len(rows) - 1) / (limit - 1)) for k in range(limit)})
    return [rows[k] for k in chosen]


def _series(rows: Iterable[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [
        (int(step), value)
        for row in rows
        if (step := finite(row.get("step"))) is not None and (value := finite(row.get(key))) is not None
    ]
    return [step for step, _ in points], [value for _, value in points]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _object(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _text(path)
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds no whole JSON object and was left out.")
        return {}
    return value


def _evaluations(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """By step, the newest line of a step. Split at line feeds only: a model's text may hold other line ends."""
    found: dict[int, dict[str, Any]] = {}
    num_bad = 0
    for line in _text(path).split("\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        step = finite(row.get("step")) if isinstance(row, dict) else None
        if step is None:
            num_bad += 1
        else:
            found[int(step)] = {**row, "step": int(step)}
    if num_bad:
        notes.append(f"{num_bad} torn or unreadable line(s) of {path.name} were left out.")
    return [found[step] for step in sorted(found)]


def _config(text: str, notes: list[str]) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError):  # ValueError: a number of thousands of digits
        notes.append(f"{CONFIG} could not be read as YAML; it is shown below as it is.")
        return {}
    return tree if isinstance(tree, dict) else {}
