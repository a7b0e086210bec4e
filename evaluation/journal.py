"""A run's journal: each step and evaluation is written down, exported, shown, and looked at for troubles."""

from collections.abc import Mapping
from typing import Any

from cluster.memory import memory_metrics
from cluster.training_metrics import TrainingMetrics
from core.checkpoint import list_checkpoints
from core.config import Config
from core.console import Console, finite
from core.evaluations import Evaluation, append_evaluation, read_evaluations
from core.metrics import MetricsLog, read_metrics
from core.watch.watcher import Watcher
from evaluation.loggers import open_loggers


class Journal:
    """Of one run under way; Ray must be up. What happened after the checkpoint of a resume does not count."""

    def __init__(self, config: Config, console: Console, start_step: int) -> None:
        self._config, self._console = config, console
        self._metrics = MetricsLog(config.run_dir)
        self._exported = TrainingMetrics(config.run_dir.name)
        self._loggers = open_loggers(config, start_step, console.say)
        self._watcher = Watcher(
            config,
            [row for row in read_metrics(config.run_dir) if row["step"] < start_step],
            [one for one in read_evaluations(config.run_dir) if one.step <= start_step],
        )
        self._watching = config.watch.every > 0

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One finished step, counted from 0."""
        metrics = {**metrics, **memory_metrics()}
        self._watcher.step(metrics)
        metrics |= self._watcher.measures()
        self._metrics.append(metrics)
        self._exported.record(metrics)
        self._log(metrics["step"] + 1, metrics)
        self._console.step(metrics)
        if self._watching and (metrics["step"] + 1) % self._config.watch.every == 0:
            self._look()

    def evaluation(self, evaluation: Evaluation) -> None:
        """One held-out evaluation after `evaluation.step` steps."""
        append_evaluation(self._config.run_dir, evaluation)
        self._watcher.evaluation(evaluation)
        self._exported.record({"heldout_accuracy": evaluation.accuracy} | self._watcher.measures())
        self._log(evaluation.step, {"heldout_accuracy": evaluation.accuracy})
        self._console.evaluation(evaluation.step, evaluation.accuracy)
        if self._watching:
            self._look()

    def close(self) -> None:
        """Nothing is written any more; the exported numbers fade."""
        for logger in self._loggers:
            logger.close()
        self._exported.close()
        self._metrics.close()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {name: number for name, value in values.items() if (number := finite(value)) is not None}
        for logger in self._loggers:
            logger.log(step, numbers)

    def _look(self) -> None:
        """Says each new trouble with its cure. A check that fails is said too: a run of days must not end by it."""
        checkpoints = tuple(step for step, _ in list_checkpoints(self._config.run_dir))
        try:
            for finding in self._watcher.news(checkpoints):
                self._console.say(finding.text())
        except Exception as error:
            self._watching = False
            self._console.say(
                f"warning: the checks failed and are left out from here on: {type(error).__name__}: {error}; "
                f"`python -m cluster.doctor {self._config.run_dir}` shows where"
            )
