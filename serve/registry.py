"""The registry: which version is stable, which is the canary, and the canary's share of traffic; on disk, one truth.

registry.json is replaced whole; each change raises the epoch by one and names the epoch it was decided on, so that of
two writers one learns that it lost. registry.jsonl holds every transition with its reason. The line of the newest
transition stands in registry.json too: a kill between the two files loses no line, the next writer adds it.
"""

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.durable import append_line, write_text
from core.errors import RunBroken, UserError
from serve.artefacts.artefact import artefacts_folder, flaw

FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


class LostRace(RuntimeError):
    """The registry has moved on since the epoch a change was decided on; read `routing()` and decide again."""


@dataclass(frozen=True)
class Routing:
    """Who serves."""

    epoch: int  # counts transitions; 0: nothing was ever registered
    stable: str | None  # digest
    canary: str | None  # digest
    share: float  # of traffic that goes to the canary, 0 to 1
    previous: str | None = None  # the stable digest before this one, for a rollback


@dataclass(frozen=True)
class Transition:
    """One change, as registry.jsonl holds it."""

    routing: Routing
    reason: str
    at: str  # UTC, ISO 8601


class Registry:
    """The registry of one serving folder; any number of processes may hold one."""

    def __init__(self, serve_dir: Path) -> None:
        self.serve_dir = serve_dir
        self._file, self._log = serve_dir / "registry.json", serve_dir / "registry.jsonl"
        self._lock = serve_dir / "registry.lock"

    def routing(self) -> Routing:
        """The Routing as it stands now; RunBroken where registry.json cannot be read."""
        newest = self._newest()
        return newest.routing if newest else Routing(0, None, None, 0.0)

    def history(self) -> list[Transition]:
        """Every transition, oldest first; a line that a kill tore is left out, the newest never is."""
        lines = self._log.read_bytes().split(b"\n") if self._log.is_file() else []
        found: dict[int, Transition] = {}
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                transition = _transition(json.loads(line))
                found[transition.routing.epoch] = transition
        newest = self._newest()
        if newest:
            found[newest.routing.epoch] = newest
        return [found[epoch] for epoch in sorted(found)]

    def compare_and_set(self, expected_epoch: int, reason: str, **changes: Any) -> Routing:
        """The Routing after `changes` (stable, canary, share), durable; its epoch is expected_epoch + 1.

        A stable that is replaced becomes `previous`; a canary that is taken away takes its share with it. Raises
        LostRace where the epoch is another by now, and UserError where a digest has no whole artefact or the
        combination makes no sense; then nothing has changed.
        """
        unknown = sorted(set(changes) - {"stable", "canary", "share"})
        if unknown or not changes:
            raise UserError(
                f"a change of the registry must be of stable, canary or share, got {', '.join(unknown) or 'nothing'}"
            )
        for role in ("stable", "canary"):
            if changes.get(role) is not None:
                self._check_artefact(role, changes[role])  # before the lock: hashing takes seconds
        with self._locked():
            now = self._expected(expected_epoch)
            if changes.get("stable", now.stable) != now.stable:
                changes = {**changes, "previous": now.stable}
            if "canary" in changes and changes["canary"] is None:
                changes = {"share": 0.0, **changes}
            return self._set(replace(now, epoch=now.epoch + 1, **changes), reason)

    def rollback(self, expected_epoch: int, reason: str) -> Routing:
        """The Routing with the previous stable version back in its place and no canary; errors as above."""
        target = self.routing().previous
        if target is not None:
            self._check_artefact("previous", target)
        with self._locked():
            now = self._expected(expected_epoch)
            if now.previous is None:
                raise UserError("a rollback must have a previous stable version to go to, got none; set stable instead")
            return self._set(Routing(now.epoch + 1, now.previous, None, 0.0, None), reason)

    def _check_artefact(self, role: str, digest: object) -> None:
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise UserError(f"{role} must be a digest of 64 hex digits, got {str(digest)[:80]!r}")
        wrong = flaw(artefacts_folder(self.serve_dir) / digest)
        if wrong:
            raise UserError(f"{role} must be the digest of a whole artefact, got {digest}: {wrong}; export it again")

    def _expected(self, epoch: int) -> Routing:
        now = self.routing()
        if now.epoch != epoch:
            newest = self._newest()
            last = f", last: {newest.reason}" if newest else ""
            raise LostRace(
                f"the registry must still be at epoch {epoch}, got {now.epoch} (stable {now.stable}, canary "
                f"{now.canary}, share {now.share:g}{last}); read the routing and decide again"
            )
        return now

    def _set(self, routing: Routing, reason: str) -> Routing:
        _check(routing)
        self._complete_log()
        transition = Transition(routing, reason, datetime.now(UTC).isoformat(timespec="milliseconds"))
        write_text(self._file, json.dumps({"format": FORMAT, **asdict(transition)}, indent=1) + "\n")
        self._complete_log()
        return routing

    def _complete_log(self) -> None:
        """Adds the newest transition's line to the log unless a kill came after it."""
        newest = self._newest()
        if newest is not None:
            append_line(self._log, json.dumps(asdict(newest)))

    def _newest(self) -> Transition | None:
        try:
            tree = json.loads(self._file.read_text(encoding="utf-8"))
            if tree["format"] != FORMAT:
                raise RunBroken(f"the format of {self._file} must be {FORMAT}, got {tree['format']!r}")
            return _transition(tree)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise RunBroken(
                f"{self._file} must be a registry, got {type(error).__name__}: {error}; put the last whole line of "
                f'{self._log.name} in its place, with "format": {FORMAT} added'
            ) from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The one writer's turn. Waits for: another writer's few file writes; the kernel ends a killed one's turn."""
        self.serve_dir.mkdir(parents=True, exist_ok=True)
        with self._lock.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _check(routing: Routing) -> None:
    if not 0 <= routing.share <= 1:
        raise UserError(f"share must be 0 to 1, got {routing.share}")
    if routing.canary is None and routing.share > 0:
        raise UserError(f"share must be 0 where there is no canary, got {routing.share:g}")
    if routing.canary is not None and routing.stable is None:
        raise UserError("a canary must have a stable version beside it, got none; set stable first")
    if routing.canary is not None and routing.canary == routing.stable:
        raise UserError(f"canary must be another version than stable, got {routing.canary} for both")


def _transition(tree: dict[str, Any]) -> Transition:
    return Transition(Routing(**tree["routing"]), str(tree["reason"]), str(tree["at"]))
