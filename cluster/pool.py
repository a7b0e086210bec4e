"""A pool of Ray actors of one kind: jobs go to the least loaded, the dead are replaced, every wait has a name."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError

from core.config import ClusterConfig
from core.errors import DeadlineExceeded, RunBroken

Say = Callable[[str], None]
POLL_S = 0.5  # how often a wait looks up to say whom it waits for

MAX_CAUSE = 400  # characters of a cause in an error; Ray's own can fill a screen

# Errors that mean: this worker is gone, ask another. Anything else a worker raises is the run's own trouble.
WORKER_GONE = (RayActorError, ObjectLostError)


@dataclass
class Worker:
    """One actor of a pool; its handle changes when it is replaced."""

    name: str
    handle: Any
    ready: Any  # reference to what its start() returns
    pending: int = 0
    replacements: int = 0  # in a row, without an answer in between


@dataclass
class Call:
    """A method under way on a worker."""

    worker: Worker
    handle: Any  # the actor that was asked; differs from worker.handle after a replacement
    refs: Sequence[Any]
    asked: float = field(default_factory=time.monotonic)

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.asked


class WorkerLost(RunBroken):
    """A worker that died while several were needed at once."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"{name} died: {first_line(cause)}")


class Pool:
    """`num_workers` actors named kind-0, kind-1, ...; `spawn(name)` makes one and returns (handle, ready reference)."""

    def __init__(
        self, kind: str, num_workers: int, spawn: Callable[[str], tuple[Any, Any]], limits: ClusterConfig
    ) -> None:
        self.kind, self._spawn, self._limits = kind, spawn, limits
        self._first_cause: str | None = None
        self.num_replaced = 0
        self.workers = [Worker(f"{kind}-{index}", *spawn(f"{kind}-{index}")) for index in range(num_workers)]

    def wait_ready(self, deadline_s: float, say: Say) -> None:
        """Waits for every worker's start; replaces one that dies in it, RunBroken after restart_limit of them."""
        for worker in self.workers:
            while True:
                try:
                    self.get(Call(worker, worker.handle, [worker.ready]), deadline_s, say, "to start")
                    break
                except WORKER_GONE as error:
                    self.replace(worker, worker.handle, error)

    def call(self, method: str, *args: Any, num_returns: int = 1, worker: Worker | None = None) -> Call:
        """Asks the given worker, or the least loaded one."""
        chosen = worker or min(self.workers, key=lambda candidate: candidate.pending)
        chosen.pending += 1
        refs = getattr(chosen.handle, method).options(num_returns=num_returns).remote(*args)
        return Call(chosen, chosen.handle, refs if num_returns > 1 else [refs])

    def done(self, call: Call) -> None:
        """Notes that the call was answered: its worker is alive."""
        call.worker.pending = max(0, call.worker.pending - 1)
        if call.handle is call.worker.handle:
            call.worker.replacements = 0

    def cancel(self, call: Call) -> None:
        """Takes a call back that nobody waits for any more; its worker stops at the next chance."""
        call.worker.pending = max(0, call.worker.pending - 1)
        ray.cancel(call.refs[0])

    def get(self, call: Call, deadline_s: float, say: Say, what: str) -> Any:
        """The call's first value; waits for the named worker at most deadline_s, then DeadlineExceeded."""
        while not ray.wait([call.refs[0]], timeout=POLL_S, fetch_local=False)[0]:
            if call.waited_s > deadline_s:
                raise self.overdue(call, deadline_s, what)
            say(f"waiting for {call.worker.name} {what}, {call.waited_s:.0f} s")
        return ray.get(call.refs[0])

    def gather(self, calls: Sequence[Call], deadline_s: float, say: Say, what: str) -> list[Any]:
        """All calls' first values, in order; the first error is raised at once, for the others may wait on it.

        Waits at most deadline_s for the slowest, which DeadlineExceeded names.
        """
        pending = {call.refs[0]: call for call in calls}
        while pending:
            ready, _ = ray.wait(list(pending), timeout=POLL_S, fetch_local=False)
            for ref in ready:
                try:
                    ray.get(ref)
                except WORKER_GONE as error:
                    raise WorkerLost(pending[ref].worker.name, error) from error
                self.done(pending.pop(ref))
            if not pending or ready:
                continue
            slowest = max(pending.values(), key=lambda call: call.waited_s)
            if slowest.waited_s > deadline_s:
                raise self.overdue(slowest, deadline_s, what)
            names = ", ".join(call.worker.name for call in pending.values())
            say(f"waiting for {names} {what}, {slowest.waited_s:.0f} s")
        return [ray.get(call.refs[0]) for call in calls]

    def ask_all(self, method: str, *args: Any, deadline_s: float, say: Say, what: str) -> list[Any]:
        """Every worker's answer; a worker that dies meanwhile is replaced and left out."""
        answers = []
        for call in [self.call(method, *args, worker=worker) for worker in self.workers]:
            try:
                answers.append(self.get(call, deadline_s, say, what))
                self.done(call)
            except (*WORKER_GONE, DeadlineExceeded) as error:
                self.replace(call.worker, call.handle, error)
        return answers

    def answer(self, method: str, *args: Any, deadline_s: float, say: Say, what: str) -> Any:
        """One worker's answer; a dead or silent worker is replaced and the question asked again."""
        while True:
            call = self.call(method, *args)
            try:
                value = self.get(call, deadline_s, say, what)
            except (*WORKER_GONE, DeadlineExceeded) as error:
                self.replace(call.worker, call.handle, error)
                continue
            self.done(call)
            return value

    def replace(self, worker: Worker, handle: Any, cause: Exception) -> None:
        """Puts a new actor in the place of a dead or silent one, unless that was already done.

        RunBroken with the first cause after restart_limit replacements without an answer in between.
        """
        if handle is not worker.handle:
            return
        if self._first_cause is None or worker.replacements == 0:
            self._first_cause = first_line(cause)
        ray.kill(worker.handle)
        if worker.replacements >= self._limits.restart_limit:
            raise RunBroken(
                f"{worker.name} must stay alive, but died {worker.replacements + 1} times in a row; "
                f"first cause: {self._first_cause}; see the worker's log in Ray's session folder"
            ) from cause
        if worker.replacements:
            time.sleep(self._limits.restart_backoff_s * 2 ** (worker.replacements - 1))
        worker.replacements += 1
        self.num_replaced += 1
        worker.handle, worker.ready = self._spawn(worker.name)
        worker.pending = 0

    def overdue(self, call: Call, deadline_s: float, what: str) -> DeadlineExceeded:
        """The error that names whom we waited for, how long, and what to do."""
        return DeadlineExceeded(
            f"{call.worker.name} must answer within {deadline_s:g} s ({what}), got nothing for {call.waited_s:.0f} s; "
            f"raise the matching entry of deadlines, or look at the worker in the Ray dashboard"
        )

    def close(self) -> None:
        """Ends the pool's actors."""
        for worker in self.workers:
            ray.kill(worker.handle)


def first_line(error: BaseException) -> str:
    """The error's own words in one line, without a remote traceback."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = " ".join(lines[:3])
    return f"{type(cause).__name__}: {text[:MAX_CAUSE]}" if lines else type(cause).__name__
