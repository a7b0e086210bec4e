"""What a micro-batch adds to the loss: the clipped policy loss, weighed by truncated importance, token by token."""

import torch

from core.config import LearnerConfig
from learners.loss import clipped_policy_loss, importance_ratio
from learners.packing import PackedBatch
from policy.model import Objective


def policy_objective(
    batch: PackedBatch, weights: torch.Tensor, old_logprobs: torch.Tensor | None, learner: LearnerConfig
) -> Objective:
    """The objective of a batch with aggregation weights [n], for the log-probs of any slice of its tokens.

    old_logprobs [n] are those before the first of several optimizer steps; None where this is the only one: then they
    are the policy's own, detached, and no extra pass is needed. The importance weight min(exp(old - behavior), cap)
    corrects for the sampler (truncated importance sampling; decoupled from the clipping, 2110.00641).
    """

    def objective(policy_logprobs: torch.Tensor, part: slice) -> torch.Tensor:
        old = policy_logprobs.detach() if old_logprobs is None else old_logprobs[part]
        ratio = importance_ratio(policy_logprobs, old)
        importance = importance_ratio(old, batch.behavior_logprobs[part]).clamp(max=learner.importance_cap)
        loss = clipped_policy_loss(ratio, batch.advantages[part], learner.clip_low, learner.clip_high)
        return (weights[part] * importance * loss).sum()

    return objective
