"""The prompts of a step, as a pure function of the config and the step: nothing to save, nothing to restore."""

import random
from functools import lru_cache

from core.config import Config


def prompts_of_step(config: Config, num_rows: int, step: int) -> tuple[tuple[int, int], ...]:
    """(epoch, row) of each prompt of `step`, counted from 0: at most prompts_per_step of them, at least one.

    Each epoch is its own shuffle by (seed, epoch) and holds every row once; its last step takes what is left.
    Raises ValueError for a step below 0 or an empty dataset.
    """
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    epoch, position = divmod(step, steps_per_epoch(config, num_rows))
    first = position * config.prompts_per_step
    rows = _epoch_order(config.seed, epoch, num_rows)[first : first + config.prompts_per_step]
    return tuple((epoch, row) for row in rows)


def steps_per_epoch(config: Config, num_rows: int) -> int:
    """Steps that show every row once: num_rows / prompts_per_step, rounded up."""
    if num_rows < 1:
        raise ValueError(f"num_rows must be at least 1, got {num_rows}")
    return -(-num_rows // config.prompts_per_step)


def num_steps_of(config: Config, num_rows: int) -> int:
    """Steps of the whole run, from num_steps or from num_epochs (whole epochs, short last steps included)."""
    if config.num_steps is not None:
        return config.num_steps
    if config.num_epochs is None:
        raise ValueError("exactly one of num_steps and num_epochs must be set")
    return config.num_epochs * steps_per_epoch(config, num_rows)


# Two: at a border the loop asks for the prompts of both epochs. Tuples, so that no caller can change a shuffle.
@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, num_rows: int) -> tuple[int, ...]:
    rows = list(range(num_rows))
    # A text seeds by its SHA-512, so that (1, 23) and (12, 3) do not share a shuffle
    random.Random(f"epoch order, seed {seed}, epoch {epoch}").shuffle(rows)
    return tuple(rows)
