"""The audit of a run: what ledger, checkpoints and config.yaml prove together, without writing a byte."""

import argparse
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.checkpoint import flaw, list_checkpoints
from core.config import Config, load_config
from core.errors import UserError
from core.records import END_COLUMNS, FORMAT, LEDGER, digest_of_ids, digest_of_step, id_of


@dataclass
class AuditReport:
    """What the files of a run prove; `problems` is empty where each prompt of each epoch ended exactly once."""

    run_dir: Path
    num_steps: int = 0
    num_epochs: int = 0  # whole ones
    num_prompts: int = 0
    num_trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> groups
    num_rolled_back: int = 0  # groups, kept in the file but not counted above
    num_lineages: int = 1
    num_late: int = 0  # of finished epochs, still under way within max_staleness
    checkpoints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A page for a terminal."""
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items())
        lines = [
            f"{self.run_dir}: {self.num_steps} steps, {self.num_epochs} whole epochs of {self.num_prompts} prompts",
            f"  trained      {self.num_trained}",
            f"  dropped      {sum(self.dropped.values())}" + (f" ({reasons})" if reasons else ""),
            f"  late         {self.num_late}",
            f"  rolled back  {self.num_rolled_back} ({self.num_lineages} lineages)",
            f"  checkpoints  {', '.join(self.checkpoints) or 'none'}",
            *(f"PROBLEM {problem}" for problem in self.problems),
            "clean: every prompt ended exactly once" if not self.problems else f"{len(self.problems)} problems",
        ]
        return "\n".join(lines)


def audit(run_dir: Path) -> AuditReport:
    """What ledger, checkpoints and config.yaml prove together, read without writing, also while the run goes on.

    UserError where the folder is missing, is not a run's, or cannot be read.
    """
    if not os.path.isfile(run_dir / LEDGER):  # unlike Path's own, no error for a name too long
        raise UserError(f"audit must be given a run's folder, got {run_dir} which holds no {LEDGER}")
    config: Config = load_config(run_dir / "config.yaml")
    folders = [(step, path, flaw(path, hashes=False)) for step, path in list_checkpoints(run_dir)]  # before the ledger:
    report = AuditReport(run_dir)  # a running writer commits a step first and saves its checkpoint afterwards
    try:
        with _snapshot(run_dir / LEDGER) as db:
            _count(db, report)
            for check in (_check_facts, _check_steps, _check_ends, _check_versions, _check_epochs):
                report.problems.extend(check(db, config, report))
            recorded = [row[0] for row in db.execute("SELECT step FROM checkpoints WHERE rolled_back_by IS NULL")]
    except UserError:
        raise
    except (sqlite3.Error, TypeError, ValueError) as error:  # the last two: a fact that is missing, or no number
        raise UserError(f"{run_dir / LEDGER} must be a whole ledger, got a corrupt one: {error}") from error
    for step in sorted({*recorded, *(step for step, _, wrong in folders if wrong is None)}):
        if step > report.num_steps:
            report.problems.append(f"checkpoint {step} claims more steps than the {report.num_steps} committed")
    report.checkpoints = [
        path.name if wrong is None else f"{path.name} (broken: {wrong})" for _, path, wrong in folders
    ]
    return report


@contextmanager
def _snapshot(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection within one transaction, so that a writer at work does not move what is read."""
    name = path.absolute().as_uri()
    db = sqlite3.connect(f"{name}?mode=ro", uri=True, isolation_level=None, timeout=30)
    try:
        if not os.access(path.parent, os.W_OK) and not path.with_name(f"{LEDGER}-wal").exists():
            db.close()  # the index of the write-ahead log cannot be made here, and there is no log to read
            db = sqlite3.connect(f"{name}?immutable=1", uri=True, isolation_level=None)
        db.execute("BEGIN")
        if _value(db, "PRAGMA user_version") != FORMAT:
            raise UserError(f"{path} must be a ledger of format {FORMAT} with a run in it, got another or an empty one")
        if (found := _value(db, "PRAGMA quick_check(1)")) != "ok":
            raise sqlite3.DatabaseError(found)
        yield db
    finally:
        db.close()


def _count(db: sqlite3.Connection, report: AuditReport) -> None:
    alive = "WHERE rolled_back_by IS NULL"
    report.num_steps = _value(db, f"SELECT COUNT(*) FROM steps {alive}")
    report.num_prompts = _value(db, "SELECT COUNT(*) FROM prompts")
    report.num_trained = _value(db, f"SELECT COUNT(*) FROM ends {alive} AND reason IS NULL")
    report.dropped = dict(
        db.execute(f"SELECT reason, COUNT(*) FROM ends {alive} AND reason NOT NULL GROUP BY reason ORDER BY reason")
    )
    report.num_rolled_back = _value(db, "SELECT COUNT(*) FROM ends WHERE rolled_back_by NOT NULL")
    report.num_lineages = 1 + int(_value(db, "SELECT value FROM facts WHERE name = 'lineage'"))


def _check_facts(db: sqlite3.Connection, config: Config, report: AuditReport) -> Iterator[str]:
    facts = dict(db.execute("SELECT name, value FROM facts"))
    ids = [row[0] for row in db.execute("SELECT prompt_id FROM prompts ORDER BY row")]
    if not ids or facts.get("prompts_digest") != digest_of_ids(ids):
        yield "the list of prompts is not the one the run began with"
    expected = {
        "samples_per_prompt": config.rollout.samples_per_prompt,
        "prompts_per_step": config.prompts_per_step,
        "seed": config.seed,
    }
    for name, value in expected.items():
        if facts.get(name) != str(value):
            yield f"{name} is {value} in config.yaml and {facts.get(name)} in the ledger"


def _check_steps(db: sqlite3.Connection, config: Config, report: AuditReport) -> Iterator[str]:
    """Steps contiguous from 0, versions rising through all lineages, and each step's rows as they were committed."""
    steps = [row[0] for row in db.execute("SELECT step FROM steps WHERE rolled_back_by IS NULL ORDER BY step")]
    if steps != list(range(len(steps))):
        wrong = sorted(set(range(len(steps))) ^ set(steps)) or [  # not up to the largest: it may be any number
            n for n, times in Counter(steps).items() if times > 1
        ]
        yield f"steps must be 0 to {len(steps) - 1}, once each; missing or doubled: {_named(wrong)}"
    before = -1
    for step, version, lineage, digest in db.execute("SELECT step, version, lineage, digest FROM steps ORDER BY rowid"):
        if version <= before:
            yield f"version went from {before} to {version} at step {step} of lineage {lineage}"
        before = version
        query = f"SELECT {END_COLUMNS} FROM ends WHERE step = ? AND lineage = ? ORDER BY rowid"
        if digest != digest_of_step(step, version, db.execute(query, (step, lineage))):
            yield f"step {step} of lineage {lineage} was changed after it was committed"


def _check_ends(db: sqlite3.Connection, config: Config, report: AuditReport) -> Iterator[str]:
    """None doubled, none unknown, none outside its step, and as many a step as the schedule says."""
    alive = "FROM ends WHERE rolled_back_by IS NULL"
    doubled = f"SELECT epoch, prompt_id {alive} GROUP BY epoch, prompt_id HAVING COUNT(*) > 1"
    if found := [f"{epoch}:{prompt_id}" for epoch, prompt_id in db.execute(doubled)]:
        yield f"doubled, ended more than once: {_named(found)}"
    unknown = f"SELECT epoch, prompt_id, attempt {alive} AND prompt_id NOT IN (SELECT prompt_id FROM prompts)"
    if found := [id_of(row) for row in db.execute(unknown)]:
        yield f"unknown to the data: {_named(found)}"
    stray = """SELECT e.epoch, e.prompt_id, e.attempt FROM ends e LEFT JOIN steps s ON s.step = e.step
        AND s.lineage = e.lineage WHERE s.step IS NULL OR s.rolled_back_by IS NOT e.rolled_back_by"""
    if found := [id_of(row) for row in db.execute(stray)]:
        yield f"ended at a step that was not committed, or rolled back without it: {_named(found)}"
    counts = dict(db.execute(f"SELECT step, COUNT(*) {alive} GROUP BY step"))
    rows, size = report.num_prompts, config.prompts_per_step
    per_epoch = max(1, -(-rows // size))
    for step in range(report.num_steps):
        due = min(size, rows - step % per_epoch * size)  # the last step of an epoch is short
        if counts.get(step, 0) != due:
            yield f"step {step} must end {due} groups, got {counts.get(step, 0)}"


def _check_versions(db: sqlite3.Connection, config: Config, report: AuditReport) -> Iterator[str]:
    """Each trained group has all its samples, and tokens no older than its step allowed."""
    trained = """SELECT e.epoch, e.prompt_id, e.attempt FROM ends e
        JOIN steps s ON s.step = e.step AND s.lineage = e.lineage
        WHERE e.rolled_back_by IS NULL AND e.reason IS NULL AND """
    size = config.rollout.samples_per_prompt
    if found := [id_of(row) for row in db.execute(trained + "e.num_samples IS NOT ?", (size,))]:
        yield f"must have {size} samples, have another number: {_named(found)}"
    fresh = "e.min_version BETWEEN s.version - 1 - s.max_staleness AND e.max_version AND e.max_version < s.version"
    if found := [id_of(row) for row in db.execute(f"{trained} ({fresh}) IS NOT 1")]:
        yield f"trained on tokens older or newer than allowed: {_named(found)}"
    if found := [id_of(row) for row in db.execute(f"SELECT {END_COLUMNS} FROM ends WHERE reason = ''")]:
        yield f"dropped without a reason: {_named(found)}"


def _check_epochs(db: sqlite3.Connection, config: Config, report: AuditReport) -> Iterator[str]:
    """No prompt of a finished epoch without an end, none ended in an epoch the run has not reached.

    With max_staleness S a group overtaken at the border of an epoch may still be under way: at most S steps after
    the one it was last asked in, for by then the learner refuses its tokens.
    """
    staleness = _value(db, "SELECT max_staleness FROM steps ORDER BY rowid DESC LIMIT 1") or 0
    per_epoch = -(-report.num_prompts // config.prompts_per_step)
    report.num_epochs = report.num_steps // max(per_epoch, 1)
    early = "SELECT epoch, prompt_id, attempt FROM ends WHERE rolled_back_by IS NULL AND epoch > (step + ?) / ?"
    if found := [id_of(row) for row in db.execute(early, (staleness, max(per_epoch, 1)))]:
        yield f"of an epoch the run had not reached: {_named(found)}"
    lost = []
    for epoch in range(report.num_epochs):
        query = """SELECT prompt_id, (SELECT MAX(at_step) FROM reached r WHERE r.epoch = ?1
                AND r.prompt_id = p.prompt_id AND stage = 'asked' AND rolled_back_by IS NULL)
            FROM prompts p WHERE prompt_id NOT IN
                (SELECT prompt_id FROM ends WHERE epoch = ?1 AND rolled_back_by IS NULL) ORDER BY row"""
        for prompt_id, asked in db.execute(query, (epoch,)):
            last = max((epoch + 1) * per_epoch - 1, asked or 0)
            if staleness and report.num_steps <= last + staleness:
                report.num_late += 1
            else:
                lost.append(f"{epoch}:{prompt_id}")
    if lost:
        yield f"lost, neither trained nor dropped in a finished epoch: {_named(lost)}"


def _named(found: list) -> str:
    """The first ten, and how many more."""
    return ", ".join(map(str, found[:10])) + (f" and {len(found) - 10} more" if len(found) > 10 else "")


def _value(db: sqlite3.Connection, query: str) -> Any:
    row = db.execute(query).fetchone()
    return row[0] if row else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of `python -m core.ledger`."""
    parser = argparse.ArgumentParser(prog="python -m core.ledger", description="Reads a run's ledger.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("audit", help="prove that every prompt of every epoch ended exactly once")
    one.add_argument("run_dir", type=Path)
    try:
        report = audit(parser.parse_args(arguments).run_dir)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.text())
    return 1 if report.problems else 0
