"""A world for rollouts, simulated second by second around a real registry: gateways that hold the routing under their
lease, answers that take two seconds, versions with an error rate, a latency and a reward of their own.
"""

import collections
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serve.artefacts.artefact import Origin, store
from serve.config import ServeConfig
from serve.registry import Registry, Routing
from serve.rollout.controller import Rollout
from serve.rollout.traffic import TrafficLog, VersionTraffic


@dataclass
class Behaviour:
    error_rate: float = 0.0
    ttft_s: float = 0.1
    reward: float = 0.8
    starts: bool = True


@dataclass
class World:
    """The ports of a rollout, on a clock that only `sleep` moves."""

    serve_dir: Path
    behaviours: dict[str, Behaviour]
    requests_per_s: int = 60
    running: set[str] = field(default_factory=set)
    at: Callable[[str], None] = lambda place: None  # called before and after each port call
    num_unserved: int = 0  # requests for a version that does not run

    def __post_init__(self) -> None:
        self.now, self.log, self.generator = 1000.0, TrafficLog(), np.random.default_rng(0)
        self.pending: collections.deque[tuple[float, str]] = collections.deque()
        self.routing = Routing(0, None, None, 0.0)

    def start_version(self, digest: str) -> None:
        self.at("start_version")
        if not self.behaviours[digest].starts:
            raise RuntimeError("no weights were found")
        self.running.add(digest)
        self.at("version started")

    def stop_version(self, digest: str) -> None:
        self.at("stop_version")
        assert digest not in {by for _, by in self.pending}, "an answer was cut"
        self.running.discard(digest)
        self.at("version stopped")

    def traffic(self, digest: str) -> VersionTraffic:
        self.at("traffic")
        return self.log.report().totals.get(digest, VersionTraffic())

    def in_flight(self, digest: str, within_s: float) -> int | None:
        self.at("in_flight")
        return self.log.report().in_flight.get(digest, 0) if within_s >= 1 else None

    def probe(self, stable: str, canary: str, first: int) -> tuple[list[float], list[float]]:
        self.at("probe")
        assert {stable, canary} <= self.running
        places = range(first, min(first + 32, 64))
        stable_rewards, canary_rewards = (
            [float((place * 7 % 64) / 64 < self.behaviours[digest].reward) for place in places]
            for digest in (stable, canary)
        )
        self.at("probed")
        return stable_rewards, canary_rewards

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.at("sleep")
        for _ in range(max(1, round(seconds))):
            self.tick()

    def tick(self) -> None:
        """A second of traffic, by the routing of a second ago."""
        self.now += 1.0
        while self.pending and self.pending[0][0] <= self.now:
            self.log.end(self.pending.popleft()[1])
        for _ in range(self.requests_per_s):
            share = self.routing.share
            digest = self.routing.canary if self.generator.random() < share else self.routing.stable
            if digest is None:
                continue
            self.num_unserved += digest not in self.running
            behaviour = self.behaviours[digest]
            seconds = behaviour.ttft_s * float(np.exp(0.3 * self.generator.standard_normal()))
            self.log.record(digest, seconds, bool(self.generator.random() < behaviour.error_rate))
            self.log.begin(digest)
            self.pending.append((self.now + 2.0, digest))
        self.routing = Registry(self.serve_dir).routing()


def add_version(serve_dir: Path, name: str) -> str:
    def fill(folder: Path) -> None:
        (folder / "a.safetensors").write_text(name)

    return store(serve_dir, fill, Origin(name)).digest


class Scene:
    """A folder in which version 0 serves and others wait."""

    def __init__(self, folder: Path, max_step_s: float = 120.0, routing_lease_s: float = 1.0) -> None:
        self.versions = [add_version(folder, f"version {number}") for number in range(3)]
        canary = {"shares": [0.1, 0.5], "min_requests": 50, "max_step_s": max_step_s}
        gateway = {"routing_lease_s": routing_lease_s}
        self.config = ServeConfig.model_validate({"serve_dir": folder, "canary": canary, "gateway": gateway})
        self.registry = Registry(folder)
        self.registry.compare_and_set(0, "first", stable=self.versions[0])
        self.world = World(folder, {version: Behaviour() for version in self.versions}, running={self.versions[0]})
        self.world.tick()
        self.said: list[str] = []

    def rollout(self, promote_without_traffic: bool = False) -> Rollout:
        return Rollout(self.config, self.registry, self.world, self.said.append, promote_without_traffic)

    def states(self) -> list[str]:
        return [line["state"] for line in self.lines()]

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.config.serve_dir / "rollout.jsonl").read_text().splitlines()]

    def who(self) -> tuple[str | None, str | None, float]:
        routing = self.registry.routing()
        return routing.stable, routing.canary, routing.share


def continued(folder: Path) -> Scene:
    """The scene of a folder that others have written to, with all versions running."""
    scene = Scene.__new__(Scene)
    scene.versions = [add_version(folder, f"version {number}") for number in range(3)]
    canary = {"shares": [0.1, 0.5], "min_requests": 50, "max_step_s": 10**9}
    scene.config = ServeConfig.model_validate({"serve_dir": folder, "canary": canary})
    scene.registry = Registry(folder)
    behaviours = {version: Behaviour() for version in scene.versions}
    scene.world = World(folder, behaviours, running=set(scene.versions))
    scene.world.now = time.time()
    scene.world.routing = scene.registry.routing()
    scene.said = []
    return scene
