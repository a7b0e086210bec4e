"""One training run: its workers, its folder, and what each word of the loop in train.py does."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from actors.crew import Weights, environment, reward_pool, rollout_pool
from actors.flow import Flow, Scored
from actors.grouper import Grouper
from actors.rollout import Ask
from cluster.memory import peak_memory_bytes
from cluster.session import Session, end_session, start_session
from core.checkpoint import newest_checkpoint, write_checkpoint
from core.clock import Clock
from core.config import dump_config
from core.console import Console
from core.durable import write_text
from core.errors import RunBroken, UserError
from core.ledger import Ledger, RunFacts
from core.plan import count_parameters
from data.dataset import digest_of_rows
from data.schedule import prompts_of_step
from evaluation.heldout import evaluate
from evaluation.journal import Journal
from evaluation.report import write_report
from evaluation.summary import step_metrics, summarize
from grouping.worker import Judgement
from learners.group import LearnerGroup, LearnersLost
from policy.bundled import model_digest
from policy.published import PublishedWeights
from preparation import Prepared

MAX_STEPS_WITHOUT_SIGNAL = 10  # steps in a row without one informative group, after which going on is a waste


@dataclass(frozen=True)
class Judged:
    """A step's groups with their advantages."""

    groups: list[Scored]
    judgement: Judgement

    @property
    def kept(self) -> list[Scored]:
        return [item for item in self.groups if self.judgement.keep[item.ask.group_id]]


class Run:
    """A run that is up; a context manager, so that workers, Ray and shared memory are gone however it ends."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared, self.config, self.num_steps = prepared, prepared.config, prepared.num_steps
        self.run_dir = prepared.config.run_dir
        self._cleanup: list[Callable[[], None]] = []
        self._clock = Clock()
        self._asked: set[int] = set()  # steps whose prompts were sent out
        self._steps_without_signal = 0
        self._first_grouping = b""  # the grouping worker's state before the first step
        self._learners_lost = 0  # in a row, without a checkpoint in between

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what the run started, last started first."""
        while self._cleanup:
            self._cleanup.pop()()

    # -- starting ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.ledger = Ledger(self.run_dir)
        self._cleanup.append(self.ledger.close)
        dataset = self.prepared.dataset
        self.ledger.open_run(
            RunFacts(
                prompt_ids=tuple(prompt.prompt_id for prompt in dataset.train),
                samples_per_prompt=self.config.rollout.samples_per_prompt,
                prompts_per_step=self.config.prompts_per_step,
                seed=self.config.seed,
                max_staleness=self.config.max_staleness,
                rows_digest=digest_of_rows(dataset.train),
                model_digest=model_digest(self.prepared.model),
            )
        )
        # Only now: a resume that was refused must leave the run's own config in place.
        write_text(self.run_dir / "config.yaml", dump_config(self.config))
        found = newest_checkpoint(self.run_dir)
        self.start_step = found.step if found else 0
        self.console = Console(self.num_steps, self.start_step)
        self.console.__enter__()
        self._cleanup.append(lambda: self.console.__exit__(None, None, None))
        self._greet(found.warnings if found else [])
        rolled_back = self.ledger.roll_back(self.start_step)
        if rolled_back:
            self.console.say(f"{rolled_back} groups trained after the last checkpoint are rolled back and asked again")
        self._start_workers(found.path if found else None)

    def _greet(self, warnings: list[str]) -> None:
        for line in (*self.prepared.plan.text().splitlines(), *(f"warning: {text}" for text in warnings)):
            self.console.say(line)
        if self.start_step:
            self.console.say(f"going on from the checkpoint of step {self.start_step} in {self.run_dir}")

    def _start_workers(self, checkpoint: Path | None) -> None:
        """Starts every worker at once, then waits for them in the order they are needed."""
        config, machine, model = self.config, self.prepared.machine, self.prepared.model
        self.console.phase("starting Ray")
        self._cleanup.append(end_session)
        session = start_session(config.cluster, machine)
        self._check_cluster(session)
        self._journal = Journal(config, self.console, self.start_step)
        self._cleanup.append(self._journal.close)
        self.console.say(f"Ray dashboard: {session.dashboard or 'none'}")
        self.version = self.ledger.version_at_start()
        self._published = PublishedWeights(self.run_dir, 4 * count_parameters(model))
        self._cleanup.append(self._published.close)
        self._weights = Weights(self.version, checkpoint / "policy" if checkpoint else None)
        rollouts = rollout_pool(config, model, machine, self._weights)
        rewards = reward_pool(config)
        self.grouper = Grouper(config, machine, self.console.phase)
        threads = config.learner.threads or max(1, machine.num_cores // config.learner.num_ranks)
        # A schedule needs the run's length in steps, also where the run was given in epochs.
        counted = config.model_copy(update={"num_steps": self.num_steps, "num_epochs": None})
        self.learners = LearnerGroup(counted, model, environment(threads), self.console.phase)
        self.flow = Flow(rollouts, rewards, config.deadlines, self.console.phase)
        self._await_workers(checkpoint)

    def _await_workers(self, checkpoint: Path | None) -> None:
        """Waits until every worker is up, each at most deadlines.start_s, and says so as they come."""
        start_s, began = self.config.deadlines.start_s, time.monotonic()
        self.console.say("starting rollout, reward, grouping and learner workers (about a minute on a laptop)")
        self.flow.rewards.wait_ready(start_s, self.console.phase)
        if checkpoint:
            self.grouper.restore((checkpoint / "grouping.state").read_bytes())
        else:
            self.grouper.fit([prompt.text for prompt in self.prepared.dataset.train])
            self._first_grouping = self.grouper.state or b""
        self.console.say(f"reward and grouping workers are up after {time.monotonic() - began:.0f} s")
        self.learners.start()
        if checkpoint:
            self.learners.load(checkpoint / "learner")
        self.console.say(f"learners are up after {time.monotonic() - began:.0f} s")
        self.flow.rollouts.wait_ready(start_s, self.console.phase)
        self.console.say(f"rollout workers are up after {time.monotonic() - began:.0f} s")

    def _check_cluster(self, session: Session) -> None:
        plan = self.prepared.plan
        if plan.asked_cpus > session.num_cpus or plan.asked_gpus > session.num_gpus:
            raise UserError(
                f"the cluster must have {plan.asked_cpus:g} CPUs and {plan.asked_gpus} GPUs, "
                f"got {session.num_cpus:g} and {session.num_gpus:g}; lower the numbers of workers, or add nodes"
            )

    # -- the words of the loop -----------------------------------------------------------------------------------

    def refill(self, step: int) -> None:
        """Labels and asks the prompts of every step up to step + max_staleness that were not asked yet."""
        self._clock = Clock()
        for ahead in range(step, min(step + self.config.max_staleness + 1, self.num_steps)):
            if ahead not in self._asked:
                self._asked.add(ahead)
                self._ask(ahead)

    def _ask(self, step: int) -> None:
        rows = self.prepared.dataset.train
        places = prompts_of_step(self.config, len(rows), step)
        prompts = [rows[row] for _, row in places]
        with self._clock.time("grouping_s"):
            labels = self.grouper.label([prompt.text for prompt in prompts])
        attempts = {epoch: self.ledger.next_attempts(epoch) for epoch, _ in places}
        self.flow.ask(
            [
                Ask(epoch, order, attempts[epoch].get(prompt.prompt_id, 0), step, prompt, cluster, cluster_version)
                for order, ((epoch, _), prompt, (cluster, cluster_version)) in enumerate(
                    zip(places, prompts, labels, strict=True)
                )
            ]
        )

    def collect(self, step: int) -> list[Scored]:
        """Waits for the step's groups, complete and scored."""
        with self._clock.time("rollout_s"):
            return self.flow.collect(step)

    def judge(self, step: int, scored: list[Scored]) -> Judged:
        """Baselines and advantages, with the reference's share in the reward where there is a reference."""
        if self.config.kl_needs_reference:
            with self._clock.time("learner_s"):
                divergences = self.learners.reference_kl([item.group for item in scored])
            scored = [
                item.shaped(self.config.learner.kl_coefficient, divergence)
                for item, divergence in zip(scored, divergences, strict=True)
            ]
        with self._clock.time("grouping_s"):
            return Judged(scored, self.grouper.judge(step, scored))

    def learn(self, step: int, judged: Judged) -> dict[str, float]:
        """Metrics of one update; RunBroken after too many steps in a row that teach nothing."""
        kept = judged.kept
        advantages = [judged.judgement.advantages[item.ask.group_id] for item in kept]
        informative = any(np.any(values != 0) for values in advantages)
        self._steps_without_signal = 0 if informative else self._steps_without_signal + 1
        if self._steps_without_signal >= MAX_STEPS_WITHOUT_SIGNAL:
            raise RunBroken(
                f"one group in {MAX_STEPS_WITHOUT_SIGNAL} steps must have an advantage, got none: every answer "
                "to a prompt gets the same reward; look at the reward, the prompts, or raise rollout.temperature"
            )
        if not informative:
            self.console.say(f"step {step + 1}: no group is informative (all rewards of each prompt are equal)")
        if not kept:
            return {}
        with self._clock.time("learner_s"):
            return self.learners.update(step, self.version, [item.group for item in kept], advantages)

    def publish(self) -> None:
        """Gives the new weights a version and puts them under the rollout workers' running answers."""
        with self._clock.time("weights_s"):
            self.version = self.ledger.next_version()
            folder = self.learners.publish(self._published.folder(self.version), self.version)
            self._weights.version, self._weights.folder = self.version, folder
            pauses = self.flow.load_weights(folder, self.version)
            self._published.prune(self.version)
        self._clock.seconds["weight_update_pause_s"] = max((pause["pause_s"] for pause in pauses), default=0.0)

    def commit(self, step: int, judged: Judged, learned: dict[str, float]) -> None:
        """Makes the step durable, then shows it."""
        kept = {item.ask.group_id for item in judged.kept}
        samples = self.config.rollout.samples_per_prompt
        self.ledger.commit(
            step,
            self.version,
            [item.trained(samples) for item in judged.groups if item.ask.group_id in kept],
            [item.dropped("zero variance") for item in judged.groups if item.ask.group_id not in kept],
            [reached for item in judged.groups for reached in item.reached(step)],
        )
        metrics = step_metrics(
            step, self.version, judged.groups, judged.judgement.metrics, learned, self._clock.seconds
        )
        metrics |= {"seconds": time.monotonic() - self._clock.started, "groups_trained": len(kept)}
        metrics |= {"groups_dropped": len(judged.groups) - len(kept), "workers_replaced": self._num_replaced()}
        self._journal.step(metrics)

    def evaluate_if_due(self, step: int) -> None:
        """Held-out accuracy at the start, every evaluation.every steps, and at the end."""
        every, last = self.config.evaluation.every, self.num_steps
        if (step % every and step != last) or (step and step == self.start_step):
            return
        self._journal.evaluation(evaluate(step, self.flow, self.prepared.dataset.heldout, self.config))

    def save_if_due(self, step: int) -> None:
        """A checkpoint every checkpoint.every steps, and at the end."""
        if step % self.config.checkpoint.every and step != self.num_steps:
            return
        self.console.phase("saving a checkpoint")
        write_checkpoint(self.run_dir, step, self._fill, self.config.checkpoint.keep)
        self.ledger.checkpoint(step)
        self._learners_lost = 0

    def _fill(self, folder: Path) -> None:
        """Writes everything a resume needs, and the policy as a folder that any tool of the field can load."""
        self.learners.save(folder / "learner")
        self.learners.publish(folder / "policy", self.version)
        state = self.grouper.state
        if state is None:
            raise RunBroken("the grouping worker must have been fitted before a checkpoint is written")
        (folder / "grouping.state").write_bytes(state)

    # -- a lost learner ------------------------------------------------------------------------------------------

    def recover(self, lost: LearnersLost) -> int:
        """The step to go on from: learners are new and as the last checkpoint has them, all other workers stay up.

        What was trained since is rolled back in the ledger, and what is under way is asked again: it would be of
        weights that no longer exist. RunBroken with the first cause after cluster.restart_limit losses in a row.
        """
        first = lost
        while True:
            self._learners_lost += 1
            if self._learners_lost > self.config.cluster.restart_limit:
                raise RunBroken(
                    f"the learners must stay alive, but were lost {self._learners_lost} times without a checkpoint in "
                    f"between; first cause: {first}; run the same command again to go on from the last checkpoint"
                ) from lost
            try:
                return self._go_back(lost)
            except LearnersLost as again:
                lost = again

    def _go_back(self, lost: LearnersLost) -> int:
        found = newest_checkpoint(self.run_dir)
        step = found.step if found else 0
        self.console.say(f"{lost}; new learners go on from {f'the checkpoint of step {step}' if step else 'the start'}")
        for text in found.warnings if found else []:
            self.console.say(f"warning: {text}")
        num_abandoned = self.flow.abandon()
        self.learners.rebuild()
        num_rolled_back = self.ledger.roll_back(step)
        if found:
            self.learners.load(found.path / "learner")
        self.grouper.restore((found.path / "grouping.state").read_bytes() if found else self._first_grouping)
        self._asked.clear()
        self.publish()
        self.console.say(f"learners are up again; {num_rolled_back + num_abandoned} groups are asked again")
        return step

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Writes summary.json and report.html, and says where they are."""
        write_text(self.run_dir / "clusters.json", json.dumps(self.grouper.map()))
        summary = summarize(self.run_dir, self.config, peak_memory_bytes())
        report = write_report(self.run_dir)
        before, after = summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]
        self.console.say(f"held-out accuracy: {before:.3f} before, {after:.3f} after {summary['steps']} steps")
        self.console.say(f"report: {report}")
        self.console.say(f"summary: {self.run_dir / 'summary.json'}")

    def _num_replaced(self) -> int:
        return sum(pool.num_replaced for pool in (self.flow.rollouts, self.flow.rewards, self.grouper.pool))
