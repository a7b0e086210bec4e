"""All learner ranks as one: all are asked at once; the first that dies or falls silent is named, and all start anew."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from cluster.pool import Call, Pool, Say, WorkerLost
from core.config import Config
from core.errors import DeadlineExceeded, RunBroken
from core.trajectory import Group
from learners.rank import LearnerRank


class LearnersLost(RunBroken):
    """A rank died or fell silent: what the ranks held together is gone; LearnerGroup.rebuild and a checkpoint help."""


class RankActor:
    """One learner rank in a Ray actor; the rank itself is made once all addresses are known."""

    def __init__(self, config: Config, model: Path, rank: int) -> None:
        self._config, self._model, self._number = config, model, rank
        self._rank: LearnerRank | None = None

    def address(self) -> tuple[str, int]:
        """Host and a free port on it, where rank 0 waits for the others."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def join(self, host: str, port: int) -> int:
        """Makes the rank; waits for the other ranks to join."""
        self._rank = LearnerRank(self._config, self._model, self._number, self._config.learner.num_ranks, host, port)
        return self._number

    def update(self, step: int, version: int, advantages: list[np.ndarray], *groups: Group) -> dict[str, float]:
        """The rank's share of one update; Ray has fetched the groups into this process."""
        self.rank.version = version  # after a resume it is above the checkpoint's: versions are never given twice
        return self.rank.update(step, list(groups), advantages)

    def reference_kl(self, *groups: Group) -> list[np.ndarray]:
        return self.rank.reference_kl(list(groups))

    def publish(self, folder: Path, version: int) -> str:
        self.rank.publish(folder, version)
        return str(folder)

    def save(self, folder: Path) -> str:
        self.rank.save(folder)
        return str(folder)

    def load(self, folder: Path) -> str:
        self.rank.load(folder)
        return str(folder)

    @property
    def rank(self) -> LearnerRank:
        if self._rank is None:
            raise RunBroken(f"learner-{self._number} must join its group before it is asked")
        return self._rank


class LearnerGroup:
    """The policy's learners: groups and advantages in, new weights out."""

    def __init__(self, config: Config, model: Path, environment: dict[str, Any], say: Say) -> None:
        learner = config.learner
        self._deadlines, self._say, self._num_ranks = config.deadlines, say, learner.num_ranks
        actor = ray.remote(
            num_cpus=learner.cpus, num_gpus=1 if learner.device == "cuda" else 0, runtime_env=environment
        )(RankActor)

        def spawn(name: str) -> tuple[Any, Any]:
            handle = actor.remote(config, model, int(name.rsplit("-", 1)[1]))
            return handle, handle.address.remote()

        self._make = lambda: Pool("learner", learner.num_ranks, spawn, config.cluster)
        self._pool = self._make()

    def rebuild(self) -> None:
        """Ends every rank, also those that still wait for a dead one, and brings new ones up with the first weights."""
        self._pool.close()
        self._pool = self._make()
        self.start()

    def start(self) -> None:
        """Brings all ranks up; waits deadlines.start_s for each."""
        first = self._pool.workers[0]
        (host, port), *_ = self._answers(
            [Call(first, first.handle, [first.ready])], self._deadlines.start_s, "to start"
        )
        self._ask("join", host, port, deadline_s=self._deadlines.start_s, what="to join the learner group")

    def update(
        self, step: int, version: int, groups: Sequence[Any], advantages: Sequence[np.ndarray]
    ) -> dict[str, float]:
        """Metrics of one update of the weights `version`; groups are references, their tokens stay unseen here."""
        words = (step, version, list(advantages), *groups)
        return self._ask("update", *words, deadline_s=self._deadlines.learner_s, what="to learn")[0]

    def reference_kl(self, groups: Sequence[Any]) -> list[np.ndarray]:
        """Sum over each answer's tokens of log policy - log reference, [G] a group."""
        return self._ask(
            "reference_kl", *groups, deadline_s=self._deadlines.learner_s, what="to compare with the reference"
        )[0]

    def publish(self, folder: Path, version: int) -> Path:
        """Writes the weights for the rollout workers; all ranks take part."""
        self._ask("publish", folder, version, deadline_s=self._deadlines.weights_s, what="to publish weights")
        return folder

    def save(self, folder: Path) -> None:
        """Writes everything a resume needs of the learners."""
        self._ask("save", folder, deadline_s=self._deadlines.checkpoint_s, what="to save a checkpoint")

    def load(self, folder: Path) -> None:
        """Continues from what save wrote."""
        self._ask("load", folder, deadline_s=self._deadlines.checkpoint_s, what="to load a checkpoint")

    def close(self) -> None:
        self._pool.close()

    def _ask(self, method: str, *args: Any, deadline_s: float, what: str) -> list[Any]:
        calls = [self._pool.call(method, *args, worker=worker) for worker in self._pool.workers]
        return self._answers(calls, deadline_s, what)

    def _answers(self, calls: list[Call], deadline_s: float, what: str) -> list[Any]:
        try:
            return self._pool.gather(calls, deadline_s, self._say, what)
        except (WorkerLost, DeadlineExceeded) as error:
            raise LearnersLost(f"{error} ({what})") from error
