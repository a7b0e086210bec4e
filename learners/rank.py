"""One learner rank: a DeepSpeed engine in one process; groups and advantages in, new weights out.

Plain Python; it is made an actor of elsewhere, and runs alone with `python -m learners.alone`. Every rank is given all
groups of a step and takes its share, so denominators and staleness are known without asking the others.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from core.allocator import keep_freed_memory
from core.config import Config
from core.trajectory import Group
from learners.dither import dither_masters, dither_parameters
from learners.engine import (
    backward,
    deepspeed_module,
    full_weights,
    join_process_group,
    leave_process_group,
    optimizer_digest,
    optimizer_step,
    start_engine,
    weights_digest,
)
from learners.loss import AGGREGATION_OF_LOSS, aggregation_weights, importance_ratio
from learners.objective import policy_objective
from learners.packing import PackedBatch, StepTokens, informative, piece_tokens, step_tokens, trainable_pieces
from learners.schedule import learning_rate
from learners.shares import batches_of_rank
from learners.staleness import check_staleness
from learners.state import load_state, save_state
from learners.tally import Tally
from policy.model import Objective, Policy, TokenScores, TokenStream, export_weights, load_model, resolve_dtype


class LearnerRank:
    """Rank `rank` of `world_size`; making it waits for the other ranks (at most deadlines.start_s).

    model_dir is the run's original model: a resume loads its checkpoint over it, the KL reference stays with it.
    """

    def __init__(
        self, config: Config, model_dir: Path | str, rank: int, world_size: int, master_addr: str, master_port: int
    ):
        self.config, self.model_dir, self.rank, self.world_size = config, Path(model_dir), rank, world_size
        learner = config.learner
        if learner.device == "cpu":
            keep_freed_memory()
        torch.set_num_threads(learner.threads or max(1, len(os.sched_getaffinity(0)) // world_size))
        self.dtype = resolve_dtype(learner.dtype, learner.device)
        timeout_s = max(config.deadlines.start_s, config.deadlines.learner_s)
        join_process_group(learner, rank, world_size, (master_addr, master_port), timeout_s)
        torch.manual_seed(config.seed)
        model = load_model(self.model_dir, self.dtype, learner.device)
        self._parameters = dict(model.named_parameters())
        policy = Policy(model, config.rollout.temperature, learner.logprob_chunk, learner.checkpoint_every_layers)
        self.policy = policy
        if self.dtype == torch.float32 and resolve_dtype(config.rollout.dtype, config.rollout.device) == torch.bfloat16:
            dither_parameters(self._parameters, config.seed)
        self._engine = start_engine(config, policy, self.dtype)
        if self.dtype == torch.bfloat16:
            dither_masters(self._engine, deepspeed_module(learner.device), self._parameters, config.seed)
        self._reference = self._make_reference() if learner.kl_coefficient > 0 else None
        self._last_kl: float | None = None
        self.version = 0  # of the weights, as last published
        self.num_updates = 0  # optimizer steps taken

    def update(self, step: int, groups: list[Group], advantages: list[np.ndarray]) -> dict[str, float]:
        """Metrics of one loop step: num_minibatches optimizer steps on groups with their advantages [G].

        A minibatch without a trainable token is skipped: weights and optimizer stay as they are. Waits for the other
        ranks in every collective. Raises RunBroken for too old tokens and for a loss or gradient that is not finite.
        """
        started = time.perf_counter()
        whole = step_tokens(groups, advantages, self.config.learner.mask_truncated)
        metrics = check_staleness(step, whole, self.version, self.config.max_staleness)
        minibatches = self._minibatches(groups, advantages)
        old = self._old_logprobs(minibatches) if len(minibatches) > 1 else [None] * len(minibatches)
        tally = Tally(self._engine.device)
        taken: list[dict[str, float]] = []
        for tokens, old_logprobs in zip(minibatches, old, strict=True):
            if tokens.mask.any():
                taken.append(self._optimizer_step(tokens, old_logprobs, tally))
        metrics |= tally.metrics()
        metrics |= {name: float(np.mean([one[name] for one in taken])) for name in (taken[0] if taken else {})}
        seconds = time.perf_counter() - started
        metrics |= {
            "updates_skipped": float(len(minibatches) - len(taken)),
            "learner_updates": float(self.num_updates),
            "tokens_trained": float(whole.mask.sum()),
            "answers_masked": float(whole.num_answers - len(np.unique(whole.answer[whole.mask]))),
            "learner_seconds": seconds,
            "learner_tokens_per_s": sum(_network_tokens(informative(tokens)) for tokens in minibatches) / seconds,
        }
        if self._last_kl is not None:
            metrics["kl_reference"] = self._last_kl
        return metrics

    def reference_kl(self, groups: list[Group]) -> list[np.ndarray]:
        """Sum over each answer's trained tokens of policy - reference log-prob, [G] float64 a group (k1).

        The loop takes kl_coefficient times it from the rewards BEFORE a baseline is taken. The reference is the run's
        original model. Every rank gets all values; waits for the other ranks. RuntimeError where kl_coefficient is 0.
        """
        if self._reference is None:
            raise RuntimeError("reference_kl must only be asked with learner.kl_coefficient above 0, got 0")
        tokens = step_tokens(
            groups, [np.zeros(group.num_samples) for group in groups], self.config.learner.mask_truncated
        )
        sums = torch.zeros(tokens.num_answers, dtype=torch.float64, device=self._engine.device)
        for batch, counts in self._batches(tokens) if tokens.mask.any() else []:
            with torch.no_grad():
                policy = self._score(batch.stream).logprobs
                reference = self._reference.score(batch.stream).logprobs
            if counts:
                answer = torch.from_numpy(tokens.answer[batch.token.cpu().numpy()]).to(sums.device)
                sums.index_add_(0, answer, (policy - reference).to(torch.float64))
        distributed.all_reduce(sums)
        self._last_kl = float(sums.sum() / max(int(tokens.mask.sum()), 1))
        edges = np.cumsum([group.num_samples for group in groups])[:-1]
        return np.split(sums.cpu().numpy(), edges)

    def publish(self, folder: Path | str, version: int, dtype: str | None = None) -> None:
        """Writes the weights as a Hugging Face folder in the learner's own dtype, or in `dtype`; rank 0 writes.

        Every rank must call it; version becomes that of tokens drawn from now on.
        """
        weights = dict(full_weights(self._engine, self._parameters, on_rank=self.rank == 0))
        if self.rank == 0:
            wanted = None if dtype is None else resolve_dtype(dtype, self.config.learner.device)
            export_weights(weights, self.model_dir, folder, wanted)
        distributed.barrier()
        self.version = version

    def save(self, folder: Path | str) -> None:
        """Writes all a resume needs (weights, fp32 masters, moments, counters, RNG); every rank must call it."""
        save_state(
            self._engine, Path(folder), self._set_up(), {"version": self.version, "num_updates": self.num_updates}
        )

    def load(self, folder: Path | str) -> None:
        """Continues from what save wrote; every rank must call it. UserError where it was written by another set-up."""
        state = load_state(self._engine, Path(folder), self._set_up())
        self.version, self.num_updates = state["version"], state["num_updates"]

    def state_digest(self) -> str:
        """A hash of the whole weights and this rank's optimizer state; every rank must ask."""
        return (weights_digest(self._engine, self._parameters) + optimizer_digest(self._engine)).hex()

    def weights_digest(self) -> str:
        """A hash of the whole weights, the same on every rank; every rank must ask."""
        return weights_digest(self._engine, self._parameters).hex()

    def weights(self) -> dict[str, torch.Tensor]:
        """All weights on the CPU by their Hugging Face names; every rank must ask."""
        return {name: weight.clone() for name, weight in full_weights(self._engine, self._parameters, on_rank=True)}

    def close(self) -> None:
        """Leaves the process group; the rank is of no use afterwards."""
        self._engine.destroy()
        leave_process_group()

    def _make_reference(self) -> Policy:
        learner = self.config.learner
        model = load_model(self.model_dir, self.dtype, learner.device).requires_grad_(False)
        return Policy(model, self.config.rollout.temperature, learner.logprob_chunk).eval()

    def _score(self, stream: TokenStream, objective: Objective | None = None) -> TokenScores:
        return TokenScores(*self._engine(stream, objective))

    def _set_up(self) -> dict[str, Any]:
        return {
            "num_ranks": self.world_size,
            "zero_stage": self.config.learner.zero_stage,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def _minibatches(self, groups: list[Group], advantages: list[np.ndarray]) -> list[StepTokens]:
        count = max(1, min(self.config.learner.num_minibatches, len(groups)))
        masked = self.config.learner.mask_truncated
        return [
            step_tokens([groups[place] for place in part], [advantages[place] for place in part], masked)
            for part in np.array_split(np.arange(len(groups)), count)
        ]

    def _batches(self, tokens: StepTokens) -> list[tuple[PackedBatch, bool]]:
        limit = self.config.learner.max_tokens_per_micro_batch
        batches = batches_of_rank(tokens, self.rank, self.world_size, limit)
        return [(batch.to(self._engine.device), counts) for batch, counts in batches]

    def _old_logprobs(self, minibatches: list[StepTokens]) -> list[torch.Tensor | None]:
        """Log-probs [N] under the weights before the first of several optimizer steps."""
        results: list[torch.Tensor | None] = []
        for tokens in minibatches:
            logprobs = torch.zeros(len(tokens.tokens), device=self._engine.device)
            for batch, counts in self._batches(tokens) if tokens.mask.any() else []:
                with torch.no_grad():
                    scores = self._score(batch.stream)
                if counts:
                    logprobs[batch.token] = scores.logprobs
            results.append(logprobs)
        return results

    def _optimizer_step(self, tokens: StepTokens, old: torch.Tensor | None, tally: Tally) -> dict[str, float]:
        learner = self.config.learner
        weights = aggregation_weights(
            torch.from_numpy(tokens.answer),
            torch.from_numpy(tokens.mask),
            AGGREGATION_OF_LOSS[learner.loss],
            self.config.rollout.max_new_tokens,
        ).to(self._engine.device)
        batches = self._batches(informative(tokens))

        def backward_all() -> float:
            total = 0.0
            for place, (batch, counts) in enumerate(batches):
                old_logprobs = None if old is None else old[batch.token]
                objective = policy_objective(batch, weights[batch.token], old_logprobs, learner)
                scores = self._score(batch.stream, objective)
                backward(self._engine, scores.loss, is_last=place == len(batches) - 1)
                total += float(scores.loss.detach())
                if counts:
                    fresh = torch.from_numpy(tokens.version[batch.token.cpu().numpy()] == self.version)
                    self._count(tally, batch, scores, old_logprobs, fresh)
            return total

        rate = learning_rate(self.config, self.num_updates)
        loss, norm = optimizer_step(self._engine, learner, rate, backward_all, self.dtype)
        self.num_updates += 1
        clipped = float(norm > learner.max_grad_norm)
        return {"loss": loss, "grad_norm": norm, "grad_clipped": clipped, "learning_rate": rate}

    def _count(
        self, tally: Tally, batch: PackedBatch, scores: TokenScores, old: torch.Tensor | None, fresh: torch.Tensor
    ) -> None:
        learner = self.config.learner
        before = scores.logprobs if old is None else old
        ratio = importance_ratio(scores.logprobs, before)
        tally.add(
            ratio=ratio,
            importance=importance_ratio(before, batch.behavior_logprobs),
            difference=(before - batch.behavior_logprobs).abs(),
            fresh=fresh.to(ratio.device),
            entropy=scores.entropy,
            clipped=(
                (ratio < 1 - learner.clip_low) & (batch.advantages < 0),
                (ratio > 1 + learner.clip_high) & (batch.advantages > 0),
            ),
            cap=learner.importance_cap,
        )


def _network_tokens(tokens: StepTokens) -> int:
    """Tokens that go through the network once each, over all ranks."""
    pieces = trainable_pieces(tokens)
    return sum(piece_tokens(tokens, piece) for piece in pieces)
