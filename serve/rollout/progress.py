"""Where a version's rollout stands: on disk, and in the registry, and the two agree after any kill.

SERVE_DIR/rollout.json holds the newest transition and is replaced whole; rollout.jsonl has a line for each, with its
reason. A transition is written before the registry is changed, with the registry's epoch at that moment: who finds the
registry at that epoch makes the change, who finds it made goes on, who finds another knows that somebody stepped in.
Transitions are numbered, and compared as the registry compares epochs: of two controllers, or of a controller and a
person's rollback, one learns that the other took over.
"""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from core.durable import append_line, write_text
from core.errors import RunBroken, UserError
from serve.registry import LostRace, Registry, Routing
from serve.rollout.traffic import VersionTraffic

FORMAT = 1
Rewards = tuple[tuple[float, ...], tuple[float, ...]]  # of stable and canary, probe by probe


class TakenOver(RuntimeError):
    """Another process has written the next transition."""


@dataclass(frozen=True)
class Progress:
    """The newest transition."""

    number: int  # of the transition, over all rollouts of this folder
    state: str
    reason: str
    at: str  # UTC, ISO 8601
    candidate: str  # digest
    stable: str  # digest that serves when the rollout starts
    older: str | None  # digest that was kept warm for a rollback until then
    share: float  # of the canary
    epoch: int  # the registry's, before this transition's change
    since: float  # by Ports.clock
    before: tuple[VersionTraffic, VersionTraffic]  # totals of stable and canary when the window of traffic began
    num_restarts: int = 0  # windows of this step before this one
    rewards: Rewards = ((), ())  # of all probes so far
    is_settled: bool = False  # nothing is left to do

    @property
    def is_canary(self) -> bool:
        """Whether it is still to be decided."""
        return self.state == "started" or self.state.startswith("share_")


class Journal:
    """The transitions of a serving folder's rollouts. `now` is where this process believes the rollout to stand."""

    now: Progress

    def __init__(self, registry: Registry) -> None:
        folder = registry.serve_dir
        self._registry = registry
        self._file, self._log, self._lock = (folder / f"rollout.{end}" for end in ("json", "jsonl", "lock"))

    def newest(self) -> Progress | None:
        """None before the first; RunBroken where rollout.json cannot be read."""
        try:
            tree = json.loads(self._file.read_text(encoding="utf-8"))
            if tree.pop("format") != FORMAT:
                raise ValueError(f"another format than {FORMAT}")
            before = [VersionTraffic(**{**side, "ttft_counts": tuple(side["ttft_counts"])}) for side in tree["before"]]
            rewards = tuple(map(tuple, tree["rewards"]))
            return Progress(**{**tree, "before": (before[0], before[1]), "rewards": rewards})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise RunBroken(
                f"{self._file} must be a rollout's progress, got {type(error).__name__}: {error}; take the canary out "
                "of the registry, then remove the file"
            ) from None

    def load(self) -> Progress | None:
        """The newest transition, its line in the log where a kill came before that."""
        with self._locked():
            return self.newest()

    def begin(self, candidate: str, since: float) -> None:
        """Writes the first transition. UserError where another rollout is under way or the registry is not ready."""
        with self._locked():
            newest, routing = self.newest(), self._registry.routing()
            if newest is not None and not newest.is_settled:
                raise UserError(
                    f"a rollout must have ended before another starts, got {newest.candidate} in state {newest.state}; "
                    "resume it or roll it back"
                )
            if routing.stable is None or routing.canary is not None or routing.stable == candidate:
                raise UserError(
                    f"a rollout must start with another stable version and no canary, got candidate {candidate}, "
                    f"stable {routing.stable}, canary {routing.canary}"
                )
            first = Progress(
                number=newest.number + 1 if newest else 1,
                state="started",
                reason=f"{candidate} is to take over from {routing.stable}",
                at=_utc(),
                candidate=candidate,
                stable=routing.stable,
                older=routing.previous,
                share=0.0,
                epoch=routing.epoch,
                since=since,
                before=(VersionTraffic(), VersionTraffic()),
            )
            self._write(first)

    def enter(self, state: str, reason: str, **changes: Any) -> None:
        """Writes the next transition and brings the registry along.

        TakenOver where another process was faster, and LostRace where the registry is not as `now` left it: a rollback
        is never refused so. Errors of the registry itself leave the transition written.
        """
        with self._locked():
            self._expect()
            routing = self._registry.routing()
            if state not in ("rolled_back", "drained"):
                self._expect_so(routing)
            core: dict[str, Any] = {"number": self.now.number + 1, "epoch": routing.epoch, "at": _utc()}
            self._write(replace(self.now, state=state, reason=reason, **core, **changes))
            self._apply()

    def make_so(self) -> None:
        """Brings the registry along where a kill came between a transition's file and it; errors as of `enter`."""
        with self._locked():
            self._expect()
            self._apply()

    def check(self) -> None:
        """TakenOver or LostRace unless all is as `now` left it."""
        self._expect()
        self._expect_so(self._registry.routing())

    def _expect(self) -> None:
        now, newest = self.now, self.newest()
        if newest is None or newest.number != now.number:
            got = f"{newest.number}: {newest.state}, {newest.reason}" if newest else "none"
            raise TakenOver(f"the rollout must still be at transition {now.number}, got {got}; another process went on")

    def _expect_so(self, routing: Routing) -> None:
        if not _is_so(self.now, routing):
            last = self._registry.history()[-1:]
            raise LostRace(
                f"the registry must be as the rollout left it in state {self.now.state}, got stable {routing.stable}, "
                f"canary {routing.canary}, share {routing.share:g} at epoch {routing.epoch}: somebody else changed it "
                f"({last[0].reason if last else 'its files are gone'})"
            )

    def _apply(self) -> None:
        """Brings the registry to where `now` wants it; LostRace where somebody else changed it since."""
        now, routing = self.now, self._registry.routing()
        if now.state == "rolled_back":
            self._withdraw()
        elif now.state != "drained" and not _is_so(now, routing):
            if now.state == "promoted":
                self._registry.compare_and_set(now.epoch, now.reason, stable=now.candidate, canary=None)
            elif routing.canary is None:
                self._registry.compare_and_set(now.epoch, now.reason, canary=now.candidate, share=now.share)
            else:
                self._registry.compare_and_set(now.epoch, now.reason, share=now.share)

    def _withdraw(self) -> None:
        """Takes all traffic from the candidate, whoever else writes to the registry."""
        now = self.now
        while True:
            routing = self._registry.routing()
            try:
                if routing.canary == now.candidate:
                    self._registry.compare_and_set(routing.epoch, now.reason, canary=None)
                elif routing.stable == now.candidate and routing.previous == now.stable:
                    self._registry.rollback(routing.epoch, now.reason)
                return
            except LostRace:
                continue

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The one writer's turn; the log is complete in it. Waits for: another's transition, an artefact's hashing."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._lock.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            newest = self.newest()
            if newest is not None:
                self._append(newest)
            yield

    def _write(self, progress: Progress) -> None:
        write_text(self._file, json.dumps({"format": FORMAT, **asdict(progress)}) + "\n")
        self.now = progress
        self._append(progress)

    def _append(self, progress: Progress) -> None:
        """Adds the transition's line to the log unless a kill came after it."""
        told = {name: value for name, value in asdict(progress).items() if name not in ("before", "rewards")}
        append_line(self._log, json.dumps(told))


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _is_so(now: Progress, routing: Routing) -> bool:
    if not now.is_canary:
        return routing.stable == now.candidate
    wanted = (now.stable, now.candidate if now.share else None, now.share)
    return (routing.stable, routing.canary, routing.share) == wanted
