"""The bound on old tokens, where they are used: the learner refuses what lags too many weight updates behind."""

import numpy as np

from core.errors import RunBroken
from learners.packing import StepTokens


def check_staleness(step: int, tokens: StepTokens, version: int, max_staleness: int) -> dict[str, float]:
    """Mean and largest number of weight updates that trained tokens lag behind `version`; empty without any token.

    Raises RunBroken where one lags more than max_staleness, or comes from a version still to be published.
    """
    ages = version - tokens.version[tokens.mask]
    if not len(ages):
        return {}
    if ages.max() > max_staleness or ages.min() < 0:
        bad = [
            group.group_id
            for group in tokens.groups
            if np.any((group.version < version - max_staleness) | (group.version > version))
        ]
        raise RunBroken(
            f"tokens must be 0 to max_staleness={max_staleness} weight updates old, got {int(ages.min())} to "
            f"{int(ages.max())} (step {step}, weights version {version}, {len(bad)} groups, first {bad[0]})"
        )
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}
