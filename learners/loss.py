"""The loss: importance weights, clipped policy losses, KL estimators and the averaging rules, as pure functions.

Legend: N tokens of many answers laid end to end, A answers. `answer` [N] int64 says whose each token is, `mask` [N]
bool which are trained. Averaging never happens here: aggregation_weights gives each token its share of ONE denominator
counted over the whole optimizer step, and loss = sum(weights * per_token), so that the update does not depend on how
the step is split into micro-batches and ranks.
"""

from typing import Literal

import torch

LOG_RATIO_CLAMP = 20.0  # exp(20) = 5e8: far outside any trust region, far inside float32

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]

# C03: one averaging rule a loss, named in the config by the loss.
AGGREGATION_OF_LOSS: dict[str, Aggregation] = {
    "grpo": "seq-mean-token-mean",  # DeepSeekMath 2402.03300, Eq. 3
    "dr_grpo": "constant",  # 2503.20783: sum / (number of answers * max_new_tokens)
    "rloo": "seq-mean-token-sum",  # 2402.14740: the log-prob of the whole answer
}


def importance_ratio(
    numerator: torch.Tensor, denominator: torch.Tensor, clamp: float = LOG_RATIO_CLAMP
) -> torch.Tensor:
    """exp(numerator - denominator) [N] of two log-probs; the difference is held within +-clamp."""
    return torch.exp((numerator - denominator).clamp(-clamp, clamp))


def sequence_ratio(
    numerator: torch.Tensor, denominator: torch.Tensor, answer: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The ratio of whole answers (the product over their trained tokens), at each of their tokens [N]."""
    difference = ((numerator - denominator) * mask).to(numerator.dtype)
    totals = difference.new_zeros(_num_answers(answer)).index_add_(0, answer, difference)
    return torch.exp(totals.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))[answer]


def truncated_weights(
    ratio: torch.Tensor, mask: torch.Tensor, cap: float | None, floor: float | None, action: str = "truncate"
) -> torch.Tensor:
    """Detached importance weights [N]: the ratio truncated to [floor, cap], or 0 outside it; 0 where masked.

    action "truncate": Yao 2025 (TIS); "mask": IcePop 2510.18855 (MIS).
    """
    ratio = ratio.detach()
    if action == "truncate":
        weights = ratio.clamp(min=floor, max=cap)
    elif action == "mask":
        inside = torch.ones_like(mask)
        if cap is not None:
            inside = inside & (ratio <= cap)
        if floor is not None:
            inside = inside & (ratio >= floor)
        weights = ratio * inside
    else:
        raise ValueError(f"action must be truncate or mask, got {action!r}")
    return weights * mask


def effective_sample_share(weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (n sum w^2) over the n trained tokens: 1 where all weigh the same."""
    return weights.sum() ** 2 / (mask.sum() * (weights**2).sum())


def clipped_policy_loss(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> torch.Tensor:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) for each token [N] (PPO 1707.06347, Eq. 7).

    dual_clip c bounds the loss of a negative advantage by -c A (1912.09729).
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def clip_shares(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares of the trained tokens without gradient because the ratio left the trust region (below, above)."""
    below = (ratio < 1 - clip_low) & (advantages < 0) & mask
    above = (ratio > 1 + clip_high) & (advantages > 0) & mask
    return below.sum() / mask.sum(), above.sum() / mask.sum()


def kl_estimate(
    kind: Literal["k1", "k2", "k3"],
    policy: torch.Tensor,
    reference: torch.Tensor,
    clamp: float | None = None,
    max_value: float | None = None,
) -> torch.Tensor:
    """KL(policy || reference) estimated at each token [N] (Schulman, Approximating KL divergence).

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = policy - reference. As a loss only k2 has the reverse KL's
    gradient; k1 belongs into the reward. clamp holds d, max_value the result (where it binds the gradient is 0).
    """
    difference = policy - reference
    if clamp is not None:
        difference = difference.clamp(-clamp, clamp)
    if kind == "k1":
        value = difference
    elif kind == "k2":
        value = difference**2 / 2
    elif kind == "k3":
        value = torch.expm1(-difference) + difference
    else:
        raise ValueError(f"kind must be k1, k2 or k3, got {kind!r}")
    return value if max_value is None else value.clamp(-max_value, max_value)


def answer_sums(per_token: torch.Tensor, answer: torch.Tensor, mask: torch.Tensor, num_answers: int) -> torch.Tensor:
    """The sum of per_token over the trained tokens of each answer [A]."""
    return per_token.new_zeros(num_answers).index_add_(0, answer, per_token * mask)


def kl_shaped_rewards(rewards: torch.Tensor, kl: torch.Tensor, beta: float) -> torch.Tensor:
    """Rewards [A] less beta times each answer's summed k1 [A]; to be shaped BEFORE any baseline is taken."""
    return rewards - beta * kl


def aggregation_weights(
    answer: torch.Tensor, mask: torch.Tensor, aggregation: Aggregation, constant: float | None = None
) -> torch.Tensor:
    """Each token's share [N] of the loss, such that loss = sum(weights * per_token); float64, 0 where masked.

    answer and mask must be those of the WHOLE optimizer step. Answers without a trained token are not counted.
    token-mean: 1 / tokens; seq-mean-token-mean: 1 / (answers * tokens of the answer); seq-mean-token-sum: 1 / answers;
    constant: 1 / (answers * constant). All 0 where nothing is trained.
    """
    used = mask.to(torch.float64)
    lengths = used.new_zeros(_num_answers(answer)).index_add_(0, answer, used)
    num_answers = (lengths > 0).sum().clamp(min=1)
    if aggregation == "token-mean":
        return used / used.sum().clamp(min=1)
    if aggregation == "seq-mean-token-mean":
        return used / (num_answers * lengths.clamp(min=1)[answer])
    if aggregation == "seq-mean-token-sum":
        return used / num_answers
    if aggregation == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"constant must be above 0 for aggregation constant, got {constant}")
        return used / (num_answers * constant)
    raise ValueError(f"aggregation must be a known rule, got {aggregation!r}")


def _num_answers(answer: torch.Tensor) -> int:
    return int(answer.max()) + 1 if len(answer) else 0
