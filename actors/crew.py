"""Who works in a run: makes Ray actors of the worker classes, with their resources and thread counts."""

import os
from pathlib import Path
from typing import Any

import ray

from actors.rollout import RolloutWorker
from cluster.pool import Pool
from core.config import Config
from core.machine import Machine
from reward.worker import RewardWorker

MAX_CONCURRENT_GROUPS = 4096  # answers under way are bounded by the engine, not by Ray's threads


class Weights:
    """The version a replaced rollout worker must start with."""

    def __init__(self, version: int, folder: Path | None) -> None:
        self.version, self.folder = version, folder


def rollout_pool(config: Config, model: Path, machine: Machine, weights: Weights) -> Pool:
    """A pool of rollout workers; a replacement is given the current weights before its first job."""
    rollout = config.rollout
    threads = rollout.threads or machine.num_cores
    actor = ray.remote(
        num_cpus=rollout.cpus,
        num_gpus=rollout.tensor_parallel_size if rollout.device == "cuda" else 0,
        max_concurrency=MAX_CONCURRENT_GROUPS,
        runtime_env=environment(threads),
    )(RolloutWorker)

    def spawn(name: str) -> tuple[Any, Any]:
        handle = actor.remote(config, name, model, threads)
        return handle, handle.start.remote(weights.version, weights.folder)

    return Pool("rollout", rollout.num_workers, spawn, config.cluster)


def reward_pool(config: Config) -> Pool:
    """A pool of reward workers."""
    actor = ray.remote(num_cpus=config.reward.cpus, runtime_env=environment(1))(RewardWorker)

    def spawn(name: str) -> tuple[Any, Any]:
        handle = actor.remote(config.reward)
        return handle, handle.check.remote()

    return Pool("reward", config.reward.num_workers, spawn, config.cluster)


def environment(threads: int) -> dict[str, Any]:
    """A worker's environment: Ray would set OMP_NUM_THREADS from num_cpus, which is not how threads are shared here."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    if "GRPO_CACHE" in os.environ:
        variables["GRPO_CACHE"] = os.environ["GRPO_CACHE"]
    return {"env_vars": variables}
