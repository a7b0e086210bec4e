"""Rollout worker: a prompt in, a group of sampled answers out."""

import asyncio
import hashlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from core.config import Config
from core.trajectory import Group, GroupInfo, Prompt, distinct_pairs, distinct_share
from policy.engine import Answer, Engine, set_engine_environment


@dataclass(frozen=True)
class Ask:
    """What the loop wants answered: a prompt, its place in the run, and its label."""

    epoch: int
    order: int  # place among the step's prompts
    attempt: int  # counts how often this prompt was asked in this epoch
    step: int  # the loop step that trains it
    prompt: Prompt
    cluster: int
    cluster_version: int

    @property
    def group_id(self) -> str:
        return f"{self.epoch}:{self.prompt.prompt_id}:{self.attempt}"

    def next_attempt(self) -> "Ask":
        """The same question under a new group id."""
        return replace(self, attempt=self.attempt + 1)


def sample_seed(run_seed: int, epoch: int, prompt_id: str, sample: int) -> int:
    """Seed of one answer: of run, epoch, prompt and sample alone, so that a second try draws the same noise."""
    words = f"{run_seed}/{epoch}/{prompt_id}/{sample}".encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:8], "big") >> 1


class RolloutWorker:
    """One vLLM engine; all groups asked of it are in the engine at once and come back as they finish."""

    def __init__(self, config: Config, name: str, model: Path, threads: int) -> None:
        self._config, self._name, self._model = config, name, model
        set_engine_environment(config.rollout.device, threads)
        self._engine: Engine | None = None
        self._started = asyncio.Event()

    async def start(self, version: int, weights: Path | None) -> str:
        """The name, once the engine is up under `version`, whose weights lie in `weights` (None: the model's own)."""
        self._engine = Engine(self._config, self._model, version)
        await self._engine.start()
        if weights is not None:
            await self._engine.load(weights, version)
        self._started.set()
        return self._name

    async def sample(self, ask: Ask) -> tuple[Group, GroupInfo]:
        """The group of G answers to one prompt, and what the driver may know of it."""
        engine = await self._running()
        started = time.monotonic()
        seeds = [
            sample_seed(self._config.seed, ask.epoch, ask.prompt.prompt_id, sample)
            for sample in range(self._config.rollout.samples_per_prompt)
        ]
        answers = await asyncio.gather(*[engine.answer(list(ask.prompt.tokens), seed) for seed in seeds])
        group = group_of(ask, answers)
        return group, describe(group, self._name, time.monotonic() - started)

    async def answer_greedily(self, prompts: list[Prompt]) -> list[str]:
        """The most likely answer's text of each prompt: what held-out evaluation reads."""
        engine = await self._running()
        answers = await asyncio.gather(*[engine.answer(list(prompt.tokens), seed=None) for prompt in prompts])
        return [answer.text for answer in answers]

    async def load_weights(self, folder: Path, version: int) -> dict[str, float]:
        """Loads a version in flight; returns the pause in seconds."""
        engine = await self._running()
        if version <= engine.version:  # a replacement that started with these weights already
            return {"pause_s": 0.0, "wait_s": 0.0}
        return await engine.load(folder, version)

    async def _running(self) -> Engine:
        """The engine; waits for start()."""
        await self._started.wait()
        if self._engine is None:
            raise RuntimeError(f"{self._name} was started without an engine")
        return self._engine


def group_of(ask: Ask, answers: list[Answer]) -> Group:
    """The Group of G answers to one ask."""
    lengths = [len(answer.tokens) for answer in answers]
    return Group(
        group_id=ask.group_id,
        prompt_id=ask.prompt.prompt_id,
        answer=ask.prompt.answer,
        prompt_tokens=np.asarray(ask.prompt.tokens, np.int32),
        tokens=np.asarray([token for answer in answers for token in answer.tokens], np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        behavior_logprobs=np.asarray([value for answer in answers for value in answer.logprobs], np.float32),
        version=np.asarray([number for answer in answers for number in answer.versions], np.int32),
        finish_reason=tuple(answer.finish_reason for answer in answers),
        loss_mask=np.ones(sum(lengths), bool),
        cluster=ask.cluster,
        cluster_version=ask.cluster_version,
        text=tuple(answer.text for answer in answers),
    )


def describe(group: Group, worker: str, seconds: float) -> GroupInfo:
    """What the driver may see of a group."""
    return GroupInfo(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        worker=worker,
        num_samples=group.num_samples,
        num_prompt_tokens=len(group.prompt_tokens),
        num_tokens=group.num_tokens,
        num_truncated=sum(reason == "length" for reason in group.finish_reason),
        num_distinct=len({group.answer_tokens(sample).tobytes() for sample in range(group.num_samples)}),
        distinct_1=distinct_share(group.tokens),
        distinct_2=distinct_pairs(group),
        min_version=int(group.version.min(initial=2**31 - 1)),
        max_version=int(group.version.max(initial=0)),
        cluster=group.cluster,
        cluster_version=group.cluster_version,
        seconds=seconds,
    )
