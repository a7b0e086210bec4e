"""A version's way into traffic: started -> share_0 .. share_k -> promoted -> drained, or rolled_back at any point.

The controller. What it decides is written by serve/rollout/progress.py, so that a kill at any instant is carried on by
`resume`; how it judges is serve/rollout/sequential.py. Left out: while no controller lives, a canary keeps its share
and nobody watches it, until `resume`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

from core.errors import UserError
from serve.config import ServeConfig
from serve.registry import LostRace, Registry
from serve.rollout.progress import Journal, Progress, Rewards, TakenOver
from serve.rollout.sequential import judge_rewards, judge_traffic
from serve.rollout.traffic import VersionTraffic

LOOK_INTERVAL_S = 1.0  # gateways report as often
RECOUNT_S = 5.0  # after counts were lost: gateways that live have reported by then


class Ports(Protocol):
    """What a rollout needs of the world."""

    def start_version(self, digest: str) -> None:
        """Returns when its replicas are ready, at once where they are already; raises where they do not come up."""

    def stop_version(self, digest: str) -> None:
        """Ends its replicas; nothing where there are none."""

    def traffic(self, digest: str) -> VersionTraffic:
        """Totals since serving started."""

    def in_flight(self, digest: str, within_s: float) -> int | None:
        """As serve.rollout.traffic.TrafficBoard says."""

    def probe(self, stable: str, canary: str, first: int) -> tuple[Sequence[float], Sequence[float]]:
        """Rewards in 0..1 of both versions on the same tasks of a fixed list, from place `first` on, some at a time.

        Two empty ones where the list is used up: no task counts twice. Raises where a version does not answer.
        """

    def clock(self) -> float:
        """Seconds that go on over a restart of this process: those since 1970."""

    def sleep(self, seconds: float) -> None: ...


class Breach(RuntimeError):
    """The canary must not go on; the sentence is the reason."""


class Rollout:
    """The controller of a serving folder; any number of processes may make one."""

    def __init__(
        self,
        config: ServeConfig,
        registry: Registry,
        ports: Ports,
        say: Callable[[str], None] = print,
        promote_without_traffic: bool = False,
    ) -> None:
        """promote_without_traffic: a step with too few answers to be judged goes on once max_step_s is over."""
        self._config, self._registry, self._ports, self._say = config, registry, ports, say
        self._promote_without_traffic = promote_without_traffic
        self._journal = Journal(registry)

    def run(self, candidate: str) -> Progress:
        """The end of the candidate's rollout, drained or rolled_back. UserError where it cannot start."""
        self._journal.begin(candidate, self._ports.clock())
        self._say(f"started: {self._now.reason}")
        return self._go_on()

    def resume(self) -> Progress | None:
        """The end of the rollout that a kill interrupted; the newest where none was, None where there was none ever."""
        newest = self._journal.load()
        if newest is None or newest.is_settled:
            return newest
        self._journal.now = newest
        self._say(f"resumed in state {newest.state}: {newest.reason}")
        return self._go_on()

    def rollback(self, reason: str) -> Progress:
        """The stable version serves alone, at once; then the candidate drains and is stopped. Its artefact stays.

        Also from another process while `run` runs, and after the promotion, to the version before. UserError where
        the candidate serves no more.
        """
        while True:
            newest = self._journal.load()
            routing = self._registry.routing()
            serves = newest is not None and (routing.stable, routing.previous) == (newest.candidate, newest.stable)
            if newest is None or (newest.is_settled and not (newest.state == "drained" and serves)):
                got = f"{newest.candidate} in state {newest.state}" if newest else "none"
                raise UserError(f"a rollback must have a rollout to take back, got {got} and stable {routing.stable}")
            self._journal.now = newest
            with contextlib.suppress(TakenOver):  # it went on meanwhile: read it again
                if serves:
                    self._ports.start_version(newest.stable)
                if newest.state != "rolled_back":
                    self._roll_back(reason)
                return self._go_on()

    @property
    def _now(self) -> Progress:
        return self._journal.now

    def _go_on(self) -> Progress:
        try:
            if self._now.is_canary:
                self._decide()
            if self._now.state == "promoted":
                self._end_promotion()
            if self._now.state == "rolled_back":
                self._end_rollback()
        except TakenOver as error:
            self._say(str(error))
            self._journal.now = self._journal.newest() or self._now
        return self._now

    def _decide(self) -> None:
        """Goes from the state reached to promoted or rolled_back; an error on the way is a reason for the latter."""
        try:
            self._journal.make_so()
            self._ports.start_version(self._now.candidate)
            seen = self._watch() if self._now.share else ""
            for step, share in enumerate(self._config.canary.shares):
                if share > self._now.share:
                    earned, rewards = self._probe()
                    start = {"share": share, "since": self._ports.clock(), "before": self._totals(), "num_restarts": 0}
                    self._journal.enter(f"share_{step}", seen or earned, rewards=rewards, **start)
                    seen = self._watch()
            self._journal.enter("promoted", seen, share=0.0)
        except TakenOver:
            raise
        except Exception as error:
            is_said = isinstance(error, Breach | LostRace)
            self._roll_back(str(error) if is_said else f"in state {self._now.state}: {type(error).__name__}: {error}")

    def _probe(self) -> tuple[str, Rewards]:
        """What all probes so far earn, in words and whole; before a step's traffic: no user is the first to see.

        Waits for both versions' answers.
        """
        now = self._now
        fresh = self._ports.probe(now.stable, now.candidate, len(now.rewards[0]))
        stable, canary = ((*before, *map(float, more)) for before, more in zip(now.rewards, fresh, strict=True))
        verdict = judge_rewards(self._config.canary, stable, canary)
        if verdict.kind == "breach":
            raise Breach(verdict.reason)
        self._say(f"reward: {verdict.reason}")
        return verdict.reason, (stable, canary)

    def _watch(self) -> str:
        """What was seen, once the step is good; Breach otherwise. Waits for: traffic, at most max_step_s."""
        canary = self._config.canary
        while True:
            self._journal.check()
            traffic = self._window()
            is_late = self._ports.clock() - self._now.since >= canary.max_step_s
            if is_late and self._promote_without_traffic:
                canary = canary.model_copy(update={"min_requests": 0})
            verdict = judge_traffic(canary, *traffic, num_restarts=self._now.num_restarts)
            if verdict.kind == "good":
                seen = f"share {self._now.share:.4g} held: {_described(*traffic)}"
                self._say(seen)
                return seen
            if verdict.kind == "breach":
                raise Breach(verdict.reason)
            if is_late:
                raise Breach(
                    f"share {self._now.share:.4g} must be judged within canary.max_step_s={canary.max_step_s:g}, but "
                    f"lacks {verdict.reason}; send more traffic, or raise canary.max_step_s"
                )
            self._ports.sleep(LOOK_INTERVAL_S)

    def _window(self) -> tuple[VersionTraffic, VersionTraffic]:
        """What stable and canary have answered in this step."""
        totals = self._totals()
        if not self._hold(totals):  # the board was started again
            self._ports.sleep(RECOUNT_S)
            totals = self._totals()
            if not self._hold(totals):
                self._journal.enter(
                    self._now.state,
                    "counts of traffic were lost with a gateway; the step counts anew",
                    before=totals,
                    num_restarts=self._now.num_restarts + 1,
                )
        stable, canary = (now.minus(before) for now, before in zip(totals, self._now.before, strict=True))
        return stable, canary

    def _totals(self) -> tuple[VersionTraffic, VersionTraffic]:
        return self._ports.traffic(self._now.stable), self._ports.traffic(self._now.candidate)

    def _hold(self, totals: tuple[VersionTraffic, VersionTraffic]) -> bool:
        return all(now.holds(before) for now, before in zip(totals, self._now.before, strict=True))

    def _end_promotion(self) -> None:
        """The old version drains and stays warm; the one that was kept warm until now is stopped."""
        try:
            self._journal.make_so()
        except LostRace as error:
            self._roll_back(str(error))
            return
        left = self._drain(self._now.stable)
        if self._now.older is not None:
            self._stop(self._now.older)
        self._journal.enter(
            "drained", f"{self._now.stable} has {left} answers under way and stays warm", is_settled=True
        )
        self._say(f"promoted {self._now.candidate}: {self._now.reason}")

    def _end_rollback(self) -> None:
        if not self._now.is_settled:
            self._journal.make_so()
            self._drain(self._now.candidate)
            self._stop(self._now.candidate)
            self._journal.enter("rolled_back", self._now.reason, is_settled=True)

    def _drain(self, digest: str) -> str:
        """How many of a version's answers are left. Waits for: no gateway routing to it, then no answer, or drain_s."""
        self._ports.sleep(self._config.gateway.routing_lease_s)
        began = self._ports.clock()
        while True:
            waited_s = self._ports.clock() - began
            left = self._ports.in_flight(digest, waited_s)
            if left == 0 or waited_s >= self._config.replica.drain_s:
                return "an unknown number of" if left is None else str(left)
            self._ports.sleep(LOOK_INTERVAL_S)

    def _stop(self, digest: str) -> None:
        routing = self._registry.routing()
        if digest not in (routing.stable, routing.canary, routing.previous):
            self._ports.stop_version(digest)

    def _roll_back(self, reason: str) -> None:
        self._journal.enter("rolled_back", reason, share=0.0, is_settled=False)
        self._say(f"rolled back: {reason}")


def _described(stable: VersionTraffic, canary: VersionTraffic) -> str:
    sides = []
    for name, traffic in (("canary", canary), ("stable", stable)):
        p95 = traffic.p(0.95)
        shown = "unknown" if p95 is None else f"{p95:.3g} s"
        sides.append(f"{name} {traffic.num_requests} answers, {traffic.num_errors} failed, p95 to first token {shown}")
    return "; ".join(sides)
