"""A run's step metrics as Ray's gauges: Ray's agents show them to Prometheus as ray_grpo_train_NAME."""

import math
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

from cluster.standing_gauges import StandingGauges

PREFIX = "grpo_train_"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class TrainingMetrics:
    """The gauges of one run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges = StandingGauges(PREFIX, ("run",))

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Sets a gauge for each finite number of one step's metrics; texts, lists and nan are left out."""
        for name, value in metrics.items():
            if isinstance(value, Real) and math.isfinite(value) and _NAME.fullmatch(name):
                self._gauges.set(name, (self._run,), float(value), name.replace("_", " "))

    def close(self) -> None:
        """The run has ended: its gauges fade."""
        self._gauges.close()
