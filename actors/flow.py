"""The flow of groups: asked of rollout workers, scored by reward workers, collected whole by reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.rollout import Ask
from cluster.pool import POLL_S, WORKER_GONE, Call, Pool, Say
from core.config import DeadlineConfig
from core.errors import DeadlineExceeded, RunBroken
from core.records import STAGES, DroppedGroup, Reached, TrainedGroup
from core.trajectory import Group, GroupInfo, Prompt


@dataclass(frozen=True)
class Scored:
    """A complete, scored group as the driver sees it: what was asked, a reference, and G numbers."""

    ask: Ask
    group: Any  # reference to the Group in the object store
    info: GroupInfo
    rewards: np.ndarray  # [G] float64

    def trained(self, num_samples: int) -> TrainedGroup:
        """What the ledger records of it once it was trained; RunBroken where it has not num_samples answers."""
        ask, info = self.ask, self.info
        if info.num_samples != num_samples:
            raise RunBroken(f"group {ask.group_id} must have {num_samples} samples, got {info.num_samples}")
        versions, reward = (info.min_version, info.max_version), float(self.rewards.mean())
        return TrainedGroup(
            ask.epoch, ask.prompt.prompt_id, ask.attempt, info.num_samples, info.num_tokens, *versions, reward
        )

    def dropped(self, reason: str) -> DroppedGroup:
        """What the ledger records of it where it was not trained."""
        return DroppedGroup(self.ask.epoch, self.ask.prompt.prompt_id, self.ask.attempt, reason)

    def reached(self, step: int) -> list[Reached]:
        """The stages it went through, for the ledger."""
        ask = self.ask
        return [Reached(ask.epoch, ask.prompt.prompt_id, ask.attempt, stage, step) for stage in STAGES]

    def shaped(self, coefficient: float, divergence: np.ndarray) -> "Scored":
        """The group with coefficient x sum of k1 over each answer's tokens taken from its reward."""
        return replace(self, rewards=self.rewards - coefficient * divergence)


@dataclass
class Flight:
    """A group under way: first at a rollout worker, then at a reward worker."""

    ask: Ask
    call: Call
    group: Any = None
    info: GroupInfo | None = None
    num_repeats: int = 0  # how often this prompt had to be sent again

    @property
    def scoring(self) -> bool:
        return self.info is not None

    @property
    def awaited(self) -> Any:
        """The small reference whose arrival moves the group on."""
        return self.call.refs[0] if self.scoring else self.call.refs[1]


@dataclass
class Flow:
    """Consumes asks; produces scored groups; replaces workers that die or fall silent and asks them again."""

    rollouts: Pool
    rewards: Pool
    deadlines: DeadlineConfig
    say: Say
    max_repeats: int = 5  # workers lost over one group before the run ends
    _flights: dict[str, Flight] = field(default_factory=dict)  # by group id
    _scored: dict[str, Scored] = field(default_factory=dict)

    def ask(self, asks: Sequence[Ask]) -> None:
        """Sends prompts to the rollout workers; returns at once."""
        for ask in asks:
            self._flights[ask.group_id] = self._sent(ask)

    def collect(self, step: int) -> list[Scored]:
        """The scored groups of one step, in the order they were asked.

        Waits for rollout and reward workers; unblocked by the last group's rewards, or by deadlines.rollout_s and
        deadlines.reward_s, after which the silent worker is replaced. RunBroken where replacing does not help.
        """
        while flights := [flight for flight in self._flights.values() if flight.ask.step <= step]:
            ready, _ = ray.wait(
                [flight.awaited for flight in self._flights.values()], timeout=POLL_S, fetch_local=False
            )
            moved = [flight for flight in self._flights.values() if flight.awaited in ready]
            for flight in moved:
                self._advance(flight)
            if not moved:
                self._watch(flights)
        done = [scored for scored in self._scored.values() if scored.ask.step <= step]
        for scored in done:
            del self._scored[scored.ask.group_id]
        return sorted(done, key=lambda scored: scored.ask.order)

    def abandon(self) -> int:
        """Forgets every group under way or not yet collected, and has the engines stop answering; returns how many."""
        flights, scored = list(self._flights.values()), list(self._scored.values())
        self._flights.clear()
        self._scored.clear()
        for flight in flights:
            self._pool_of(flight).cancel(flight.call)
        return len(flights) + len(scored)

    def load_weights(self, folder: Path, version: int) -> list[dict[str, float]]:
        """Puts a weight version into every rollout worker, in flight; returns each one's pause."""
        return self.rollouts.ask_all(
            "load_weights", folder, version, deadline_s=self.deadlines.weights_s, say=self.say, what="to load weights"
        )

    def answer_greedily(self, prompts: list[Prompt]) -> list[str]:
        """The greedy answers to all prompts, in order, shared out over the rollout workers."""
        while True:
            num_workers = len(self.rollouts.workers)
            shares = [prompts[index::num_workers] for index in range(num_workers)]
            calls = [
                self.rollouts.call("answer_greedily", share, worker=worker)
                for worker, share in zip(self.rollouts.workers, shares, strict=True)
            ]
            texts = [""] * len(prompts)
            for index, call in enumerate(calls):
                try:
                    texts[index::num_workers] = self.rollouts.get(
                        call, self.deadlines.rollout_s, self.say, "to answer held-out prompts"
                    )
                    self.rollouts.done(call)
                except (*WORKER_GONE, DeadlineExceeded) as error:
                    self.rollouts.replace(call.worker, call.handle, error)
                    break
            else:
                return texts

    def score_first_term(self, groups: list[Group]) -> list[float]:
        """The first reward term of each group's first answer: what held-out accuracy counts."""
        deadline_s, what = self.deadlines.reward_s, "to score held-out answers"
        answers = [
            self.rewards.answer("score_terms", group, deadline_s=deadline_s, say=self.say, what=what)
            for group in groups
        ]
        return [next(iter(terms.values()))[0] for terms in answers]

    def close(self) -> None:
        self.rollouts.close()
        self.rewards.close()

    def _pool_of(self, flight: Flight) -> Pool:
        return self.rewards if flight.scoring else self.rollouts

    def _sent(self, ask: Ask) -> Flight:
        return Flight(ask, self.rollouts.call("sample", ask, num_returns=2))

    def _advance(self, flight: Flight) -> None:
        pool = self._pool_of(flight)
        try:
            value = ray.get(flight.awaited)
        except WORKER_GONE as error:
            pool.replace(flight.call.worker, flight.call.handle, error)
            self._again(flight)
            return
        pool.done(flight.call)
        if flight.info is None:
            flight.group, flight.info = flight.call.refs[0], value
            flight.call = self.rewards.call("score", flight.group)
        else:
            del self._flights[flight.ask.group_id]
            self._scored[flight.ask.group_id] = Scored(
                flight.ask, flight.group, flight.info, np.asarray(value, np.float64)
            )

    def _again(self, flight: Flight) -> None:
        """Repeats the stage whose worker is gone; a group whose object is lost is sampled again, under a new id."""
        flight.num_repeats += 1
        if flight.num_repeats > self.max_repeats:
            raise RunBroken(
                f"group {flight.ask.group_id} must be answered and scored, but {flight.num_repeats} workers were lost "
                f"over it, the last one {flight.call.worker.name}; look at this prompt and at the worker's log"
            )
        if flight.scoring and _is_whole(flight.group):
            flight.call = self.rewards.call("score", flight.group)
            return
        del self._flights[flight.ask.group_id]
        again = flight.ask.next_attempt()
        self._flights[again.group_id] = replace(self._sent(again), num_repeats=flight.num_repeats)

    def _watch(self, flights: list[Flight]) -> None:
        """Says whom we wait for, and replaces a worker past its deadline."""
        oldest = max(flights, key=lambda flight: flight.call.waited_s)
        names = sorted({flight.call.worker.name for flight in flights})
        self.say(f"waiting for {len(flights)} groups ({', '.join(names)}), {oldest.call.waited_s:.0f} s")
        deadline_s = self.deadlines.reward_s if oldest.scoring else self.deadlines.rollout_s
        if oldest.call.waited_s <= deadline_s:
            return
        pool = self._pool_of(oldest)
        what = "to score a group" if oldest.scoring else "to sample a group"
        overdue = pool.overdue(oldest.call, deadline_s, what)
        pool.replace(oldest.call.worker, oldest.call.handle, overdue)
        for flight in list(self._flights.values()):
            if flight.call.handle is oldest.call.handle:
                self._again(flight)


def _is_whole(group: Any) -> bool:
    """Whether the group's object is still to be had from the store, without fetching it."""
    ready, _ = ray.wait([group], timeout=0, fetch_local=False)
    return bool(ready)
