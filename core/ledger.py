"""The ledger: ledger.sqlite in the run's folder says how each prompt of each epoch ended, one transaction a step.

Every prompt of an epoch ends exactly once: trained at a step, or dropped with a reason. Weights survive only in
checkpoints, so a restart from checkpoint k (the weights after steps 0..k-1) marks what ended at steps >= k as rolled
back. Rows are never deleted; those without `rolled_back_by` are the surviving lineage.
`python -m core.ledger audit RUN_DIR` proves the above from the files alone: exit 0 clean, 1 not, 2 not a run's folder.
"""

import fcntl
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any, Self

from core.audit import main
from core.durable import free_bytes
from core.errors import RunBroken, UserError
from core.records import (
    FORMAT,
    LEDGER,
    TABLES,
    DroppedGroup,
    Reached,
    RunFacts,
    TrainedGroup,
    check_group,
    digest_of_step,
    end_of,
    facts_as_text,
    id_of,
)


class Ledger:
    """The one writer of a run's ledger. UserError names the process that already writes it."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / LEDGER
        self._facts: RunFacts | None = None
        self._lock = _take_lock(run_dir)
        try:
            self._db = sqlite3.connect(self._path, isolation_level=None, timeout=30)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
        except sqlite3.Error as error:
            os.close(self._lock)
            raise UserError(f"{self._path} must be a ledger, got a file SQLite cannot open: {error}") from error

    def open_run(self, facts: RunFacts) -> None:
        """Records what the run is about, or compares with what it was; UserError names what a resume changed."""
        ids = facts.prompt_ids
        twice, times = Counter(ids).most_common(1)[0] if ids else ("", 0)
        if times != 1:
            raise UserError(
                f"each training row must have an id of its own, got {twice!r} {times} times; correct the data"
            )
        new = facts_as_text(facts)
        with self._transaction():
            found = self._one("PRAGMA user_version")
            if found == 0:
                for statement in TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={FORMAT}")
                self._db.executemany("INSERT INTO prompts VALUES (?, ?)", enumerate(ids))
                self._db.executemany("INSERT INTO facts VALUES (?, ?)", [*new.items(), ("lineage", 0), ("version", 0)])
            elif found != FORMAT:
                raise UserError(f"{self._path} must have format {FORMAT}, got {found}; choose another run_dir")
            old = dict(self._db.execute("SELECT name, value FROM facts"))
        # A ledger of an earlier release does not know the later facts.
        changed = [
            f"{name} was {old[name]}, is {value}" for name, value in new.items() if old.get(name, value) != value
        ]
        if changed:
            raise UserError(
                f"a resumed run must keep its data, model and sizes, got: {'; '.join(changed)} ({self._path.parent}); "
                "put them back, or choose another run_dir"
            )
        self._facts = facts

    @property
    def num_steps(self) -> int:
        """Steps committed on the surviving lineage: the next one to commit."""
        return self._one("SELECT COUNT(*) FROM steps WHERE rolled_back_by IS NULL")

    def next_version(self) -> int:
        """A weight version never given before, claimed durably: call once for each set of weights published."""
        with self._transaction():
            version = int(self._one("SELECT value FROM facts WHERE name = 'version'")) + 1
            self._set("version", version)
        return version

    def version_at_start(self) -> int:
        """The version of the weights a start puts in place: 0 for the run's first weights, a new one ever after.

        Also without a checkpoint: a start killed in its first step had claimed versions already.
        """
        return self.next_version() if int(self._one("SELECT value FROM facts WHERE name = 'version'")) else 0

    def commit(
        self,
        step: int,
        version: int,
        trained: Sequence[TrainedGroup],
        dropped: Sequence[DroppedGroup] = (),
        reached: Iterable[Reached] = (),
    ) -> None:
        """Makes `step` durable, whole or not at all: it published weights `version` and its groups ended here.

        `reached` holds what was asked, sampled and scored since the last commit. Raises RunBroken, with nothing
        written, for a step out of order, a prompt that already ended in its epoch, a group with another number of
        samples, tokens too old or too new, or a disk that refuses.
        """
        facts = self._opened()
        for group in trained:
            check_group(group, facts, version)
        if nameless := [group for group in dropped if not group.reason]:
            raise RunBroken(f"dropped group {id_of(nameless[0])} must have a reason, got none (step {step})")
        ends = [*map(end_of, trained), *map(end_of, dropped)]
        with self._transaction():
            if step != self.num_steps:
                raise RunBroken(f"the next step to commit must be {self.num_steps}, got {step} ({self._path})")
            newest = self._one("SELECT MAX(version) FROM steps")
            if newest is not None and version <= newest:
                raise RunBroken(f"the version of step {step} must be above {newest}, got {version} ({self._path})")
            lineage = self._lineage()
            for end in ends:
                self._insert_end(end, step, lineage)
            row = (step, version, facts.max_staleness, lineage, digest_of_step(step, version, ends), time.time())
            self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, NULL)", row)
            rows = [(*astuple(one), step, lineage) for one in reached]
            self._db.executemany("INSERT INTO reached VALUES (?, ?, ?, ?, ?, ?, ?, NULL)", rows)
            self._set("version", max(version, int(self._one("SELECT value FROM facts WHERE name = 'version'"))))

    def checkpoint(self, step: int) -> None:
        """Records that the checkpoint of `step` is whole; RunBroken where so many steps were never committed."""
        with self._transaction():
            if step > self.num_steps:
                raise RunBroken(f"a checkpoint must be of at most {self.num_steps} committed steps, got {step}")
            self._db.execute("INSERT INTO checkpoints VALUES (?, ?, NULL)", (step, self._lineage()))

    def roll_back(self, step: int) -> int:
        """How many groups were rolled back, for weights restored from the checkpoint of `step` (0: first weights).

        RunBroken where the checkpoint claims more steps than were committed, or where step 0 is asked for though
        later checkpoints were recorded: they went missing, and starting over is for a person to decide.
        """
        with self._transaction():
            if step > self.num_steps:
                raise RunBroken(
                    f"the checkpoint must be of at most {self.num_steps} committed steps, got one of {step} "
                    f"({self._path}); ledger and checkpoints are of different runs: choose another run_dir"
                )
            saved = {row[0] for row in self._db.execute("SELECT step FROM checkpoints WHERE rolled_back_by IS NULL")}
            if step == 0 and saved and 0 not in saved:
                raise RunBroken(
                    f"{self._path.parent / 'checkpoints'} must hold a checkpoint, got none though step {max(saved)} "
                    "was saved; put it back, or choose another run_dir"
                )
            lineage = self._lineage() + 1
            marked = {
                table: self._db.execute(
                    f"UPDATE {table} SET rolled_back_by = ? WHERE step >= ? AND rolled_back_by IS NULL",
                    (lineage, first),
                ).rowcount
                for table, first in (("steps", step), ("ends", step), ("reached", step), ("checkpoints", step + 1))
            }
            if marked["steps"]:
                self._set("lineage", lineage)
        return marked["ends"]

    def ended(self, epoch: int) -> frozenset[str]:
        """Prompt ids of `epoch` that were trained or dropped on the surviving lineage; the others are asked (again)."""
        query = "SELECT prompt_id FROM ends WHERE epoch = ? AND rolled_back_by IS NULL"
        return frozenset(row[0] for row in self._db.execute(query, (epoch,)))

    def next_attempts(self, epoch: int) -> dict[str, int]:
        """Attempt number for the next asking of each prompt of `epoch` the ledger has met; 0 for all others."""
        query = """SELECT prompt_id, MAX(attempt) + 1 FROM (SELECT epoch, prompt_id, attempt FROM reached
            UNION ALL SELECT epoch, prompt_id, attempt FROM ends) WHERE epoch = ? GROUP BY prompt_id"""
        return dict(self._db.execute(query, (epoch,)))

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _insert_end(self, end: tuple, step: int, lineage: int) -> None:
        try:
            self._db.execute(f"INSERT INTO ends VALUES ({', '.join('?' * 11)}, NULL)", (*end, step, lineage))
        except sqlite3.IntegrityError as error:
            query = "SELECT step FROM ends WHERE epoch = ? AND prompt_id = ? AND rolled_back_by IS NULL"
            before = self._one(query, end[:2])
            raise RunBroken(
                f"group {id_of(end)} must end once, got a second end at step {step} (its prompt ended at step {before})"
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise RunBroken(
                f"{self._path} could not be written: {error}; {free_bytes(self._path)} bytes are free there; nothing "
                "of this step was recorded: start again with the same run_dir once the cause is gone"
            ) from error

    def _opened(self) -> RunFacts:
        if self._facts is None:
            raise RuntimeError("open_run must be called before commit")
        return self._facts

    def _lineage(self) -> int:
        return int(self._one("SELECT value FROM facts WHERE name = 'lineage'"))

    def _set(self, name: str, value: int) -> None:
        self._db.execute("UPDATE facts SET value = ? WHERE name = ?", (str(value), name))

    def _one(self, query: str, values: tuple = ()) -> Any:
        row = self._db.execute(query, values).fetchone()
        return row[0] if row else None


def _take_lock(run_dir: Path) -> int:
    """File descriptor of the held lock; the kernel lets go of it when the process ends, however it ends."""
    path = run_dir / "ledger.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise UserError(
            f"a run folder must have one writer, got {run_dir} which process {holder} is writing; wait for it, "
            "stop it, or choose another run_dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


if __name__ == "__main__":
    sys.exit(main())
