"""The checks while a run goes on: each trouble is said once, with its cure."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from core.config import Config
from core.evaluations import Evaluation
from core.watch.checks import examine
from core.watch.finding import SEVERITIES, Finding
from core.watch.history import WINDOW, History
from core.watch.learning import heldout_decline, reward_volatility

NUM_KEPT = 500  # steps, after the opening ones: a long run's memory stays the same


class Watcher:
    """The steps of one run as they come, and which troubles were said already."""

    def __init__(self, config: Config, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Evaluation]) -> None:
        """`steps` and `evaluations` are those of before a resume."""
        self._config = config
        self._opening = list(steps[:WINDOW])
        self._later: deque[Mapping[str, Any]] = deque(steps[WINDOW:], maxlen=NUM_KEPT)
        self._evaluations = list(evaluations)
        self._said: dict[str, int] = {}  # check -> the worst severity said

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One more finished step; what was seen of it and of later ones before, is of weights that were given up."""
        if self._newest() >= metrics["step"]:
            self._opening = [one for one in self._opening if one["step"] < metrics["step"]]
            self._later = deque((one for one in self._later if one["step"] < metrics["step"]), maxlen=NUM_KEPT)
        if len(self._opening) < WINDOW:
            self._opening.append(metrics)
        else:
            self._later.append(metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        """One more held-out evaluation; of two of one step the later counts."""
        self._evaluations = [one for one in self._evaluations if one.step != evaluation.step] + [evaluation]

    def measures(self) -> dict[str, float]:
        """What two of the checks measure over several steps, for metrics.jsonl and the alerts; without the unknown."""
        run = self.history()
        found = {"reward_volatility": reward_volatility(run), "heldout_decline": heldout_decline(run)}
        return {name: value for name, value in found.items() if value is not None}

    def news(self, checkpoints: tuple[int, ...] = ()) -> list[Finding]:
        """The findings that were not said yet, or have become worse since."""
        fresh = []
        for finding in examine(self.history(checkpoints)):
            rank = SEVERITIES.index(finding.severity)
            if rank < self._said.get(finding.check, len(SEVERITIES)):
                self._said[finding.check] = rank
                fresh.append(finding)
        return fresh

    def _newest(self) -> int:
        seen = self._later or self._opening
        return seen[-1]["step"] if seen else -1

    def history(self, checkpoints: tuple[int, ...] = ()) -> History:
        return History(self._config, [*self._opening, *self._later], self._evaluations, checkpoints)
