"""What the checks read: the steps' metrics as series, the evaluations, and the config they came from."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from core.config import Config
from core.evaluations import Evaluation

WINDOW = 5  # steps of which a median is taken: two odd steps (a compilation, a hard batch) cannot move it


@dataclass(frozen=True)
class History:
    """A run so far. A value that is missing, null or not a number is left out of its series."""

    config: Config
    steps: Sequence[Mapping[str, Any]]  # of metrics.jsonl, in order
    evaluations: Sequence[Evaluation] = ()
    checkpoints: tuple[int, ...] = ()  # steps of which a checkpoint is kept

    def series(self, key: str) -> list[float]:
        """Every finite value of a metric, in order."""
        return _finite(self.steps, key)

    def recent(self, key: str, ago: int = 0) -> float | None:
        """The median over a window: the last one, or the one `ago` windows before; None where not one is whole."""
        end = len(self.steps) - ago * WINDOW
        return _median(self.steps[end - WINDOW : end], key) if end >= WINDOW else None

    def opening(self, key: str) -> float | None:
        """The median over the run's first window; None where there are not yet two whole windows to compare."""
        return _median(self.steps[:WINDOW], key) if len(self.steps) >= 2 * WINDOW else None

    def change(self, key: str) -> tuple[float, float] | None:
        """(opening, recent); None where either is unknown."""
        then, now = self.opening(key), self.recent(key)
        return None if then is None or now is None else (then, now)

    def last(self, key: str) -> float | None:
        return next((values[0] for row in reversed(self.steps) if (values := _finite([row], key))), None)

    def where(self) -> str:
        """The steps of the last window, counted from 1 as the terminal does."""
        rows = self.steps[-WINDOW:]
        return f"steps {int(rows[0]['step']) + 1} to {int(rows[-1]['step']) + 1}"


def _finite(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    values = [row.get(key) for row in rows]
    return [float(v) for v in values if isinstance(v, Real) and not isinstance(v, bool) and math.isfinite(v)]


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """None where more than half of the rows lack the value: a metric that a release did not have yet."""
    values = _finite(rows, key)
    return statistics.median(values) if 2 * len(values) > len(rows) else None
