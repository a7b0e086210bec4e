"""The learning rate of each optimizer step: warm-up, then constant or linear to zero."""

from core.config import Config
from core.errors import UserError


def learning_rate(config: Config, num_updates: int) -> float:
    """The rate of the optimizer step that follows num_updates earlier ones.

    Warm-up rises linearly and reaches the full rate at the end of `warmup_steps` optimizer steps; the linear schedule
    then falls so that it would be zero one step after the run's last. UserError where the run's length is unknown.
    """
    learner = config.learner
    if num_updates < learner.warmup_steps:
        return learner.learning_rate * (num_updates + 1) / learner.warmup_steps
    if learner.schedule == "constant":
        return learner.learning_rate
    if config.num_steps is None:
        raise UserError(
            "num_steps must be known for learner.schedule=linear, got None; the loop fills it in from num_epochs"
        )
    total = config.num_steps * learner.num_minibatches
    left = (total - num_updates) / max(total - learner.warmup_steps, 1)
    return learner.learning_rate * min(max(left, 0.0), 1.0)
