"""Sums over trained tokens that become a step's metrics, added up over micro-batches, minibatches and ranks."""

import torch
from torch import distributed

_SUMS = (
    "tokens",
    "entropy",
    "ratio",
    "clipped_low",
    "clipped_high",
    "importance",
    "truncated",
    "fresh_tokens",
    "fresh_difference",
)
_LARGEST = ("ratio_max", "importance_max", "fresh_difference_max")


class Tally:
    """Running sums (and maxima) in float64 on the learner's device."""

    def __init__(self, device: torch.device | str) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._largest = torch.full((len(_LARGEST),), -1.0, dtype=torch.float64, device=device)

    def add(
        self,
        *,
        ratio: torch.Tensor,
        importance: torch.Tensor,
        difference: torch.Tensor,
        fresh: torch.Tensor,
        entropy: torch.Tensor,
        clipped: tuple[torch.Tensor, torch.Tensor],
        cap: float,
    ) -> None:
        """Adds the tokens [n] of one micro-batch.

        difference is |policy - behavior log-prob|; fresh marks tokens drawn under the newest weights.
        """
        stale_free = difference[fresh]
        sums = (
            ratio.new_tensor(len(ratio)),
            entropy.sum(),
            ratio.sum(),
            clipped[0].sum(),
            clipped[1].sum(),
            importance.clamp(max=cap).sum(),
            (importance > cap).sum(),
            fresh.sum(),
            stale_free.sum(),
        )
        self._sums += torch.stack([value.to(torch.float64) for value in sums])
        largest = [ratio.max(), importance.max(), stale_free.max() if len(stale_free) else ratio.new_tensor(-1.0)]
        self._largest = torch.maximum(self._largest, torch.stack([value.to(torch.float64) for value in largest]))

    def metrics(self) -> dict[str, float]:
        """Means over all ranks' tokens; every rank must ask. Empty where no token was trained."""
        distributed.all_reduce(self._sums)
        distributed.all_reduce(self._largest, op=distributed.ReduceOp.MAX)
        total = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        largest = dict(zip(_LARGEST, self._largest.tolist(), strict=True))
        tokens, fresh = total["tokens"], total["fresh_tokens"]
        if not tokens:
            return {}
        metrics = {
            "entropy": total["entropy"] / tokens,
            "policy_ratio_mean": total["ratio"] / tokens,
            "policy_ratio_max": largest["ratio_max"],
            "clipped_low_share": total["clipped_low"] / tokens,
            "clipped_high_share": total["clipped_high"] / tokens,
            "importance_weight_mean": total["importance"] / tokens,
            "importance_ratio_max": largest["importance_max"],
            "importance_truncated_share": total["truncated"] / tokens,
        }
        if fresh:
            metrics["mean_abs_logprob_difference"] = total["fresh_difference"] / fresh
            metrics["max_abs_logprob_difference"] = largest["fresh_difference_max"]
        return metrics
