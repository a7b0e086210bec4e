"""All checks of a training run: what `python -m cluster.doctor` and the run itself look for."""

from collections.abc import Callable

from core.watch.clusters import clusters_lopsided, difficulty_unexplained, labels_churning, topics_fading
from core.watch.finding import SEVERITIES, Finding
from core.watch.history import History
from core.watch.learning import (
    answers_truncated,
    groups_uninformative,
    heldout_declining,
    outputs_conservative,
    reward_volatile,
    sampler_mismatch,
)
from core.watch.resources import memory_short, pause_long, phase_dominates, workers_dying

CHECKS: tuple[Callable[[History], Finding | None], ...] = (
    memory_short,
    workers_dying,
    groups_uninformative,
    reward_volatile,
    outputs_conservative,
    heldout_declining,
    sampler_mismatch,
    answers_truncated,
    topics_fading,
    difficulty_unexplained,
    clusters_lopsided,
    labels_churning,
    pause_long,
    phase_dominates,
)


def examine(run: History) -> list[Finding]:
    """What the checks find, the worst first."""
    found = [finding for check in CHECKS if (finding := check(run)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
