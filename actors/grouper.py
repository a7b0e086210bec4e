"""The grouping worker as the loop sees it: answers that outlive the worker's death, because its state is kept here."""

from collections.abc import Sequence
from typing import Any

import ray

from actors.crew import environment
from actors.flow import Scored
from cluster.pool import Pool, Say
from core.config import Config
from core.machine import Machine
from grouping.worker import GroupingWorker, Judgement, ScoredGroup


class GroupingActor(GroupingWorker):
    """Returns each answer that changes the state together with the state, so that neither is had without the other."""

    def ready(self) -> str:
        return "ready"

    def fitted(self, texts: list[str]) -> tuple[None, bytes]:
        self.fit(texts)
        return None, self.state()

    def labelled(self, texts: list[str]) -> tuple[list[tuple[int, int]], bytes]:
        return self.label(texts), self.state()

    def judged(self, step: int, groups: list[ScoredGroup]) -> tuple[Judgement, bytes]:
        return self.judge(step, groups), self.state()

    def restored(self, state: bytes) -> str:
        self.restore(state)
        return "restored"


class Grouper:
    """Labels prompts before rollout and judges scored groups; a dead worker is replaced and continues identically."""

    def __init__(self, config: Config, machine: Machine, say: Say) -> None:
        self.state: bytes | None = None
        self._deadline_s, self._say = config.deadlines.grouping_s, say
        gpu = 1 if config.grouping.device == "cuda" else 0
        actor = ray.remote(num_cpus=config.grouping.cpus, num_gpus=gpu, runtime_env=environment(machine.num_cores))(
            GroupingActor
        )

        def spawn(name: str) -> tuple[Any, Any]:
            handle = actor.remote(config.grouping, config.seed)
            ready = handle.ready.remote() if self.state is None else handle.restored.remote(self.state)
            return handle, ready

        self.pool = Pool("grouping", 1, spawn, config.cluster)

    def restore(self, state: bytes) -> None:
        """Continues from a checkpoint's state."""
        self._ask("restored", state)
        self.state = state

    def fit(self, texts: Sequence[str]) -> None:
        """Makes the first clustering."""
        _, self.state = self._ask("fitted", list(texts))

    def label(self, texts: Sequence[str]) -> list[tuple[int, int]]:
        """(cluster, cluster version) of each prompt, from the prompt alone."""
        labels, self.state = self._ask("labelled", list(texts))
        return labels

    def judge(self, step: int, groups: Sequence[Scored]) -> Judgement:
        """Advantages of a step's groups, from rewards, labels and the past; then the history moves on by one step."""
        asked = [
            ScoredGroup(
                item.ask.group_id,
                item.ask.prompt.prompt_id,
                item.ask.prompt.text,
                item.ask.cluster,
                item.rewards,
                item.ask.cluster_version,
            )
            for item in groups
        ]
        judgement, self.state = self._ask("judged", step, asked)
        return judgement

    def map(self) -> dict[str, Any]:
        """The clusters in two dimensions, for the report."""
        return self._ask("map")

    def close(self) -> None:
        self.pool.close()

    def _ask(self, method: str, *args: Any) -> Any:
        """The worker's answer; waits deadlines.grouping_s for it, and replaces a worker that is dead or silent."""
        return self.pool.answer(method, *args, deadline_s=self._deadline_s, say=self._say, what=f"to have {method}")
