"""What a ledger holds: its tables, the rows the loop hands over, and the fingerprints by which an audit reads them."""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from core.errors import RunBroken

Stage = Literal["asked", "sampled", "scored"]
STAGES: tuple[Stage, ...] = ("asked", "sampled", "scored")
LEDGER = "ledger.sqlite"
FORMAT = 1
TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE prompts (row INTEGER PRIMARY KEY, prompt_id TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE steps (step INTEGER NOT NULL, version INTEGER NOT NULL, max_staleness INTEGER NOT NULL,
    lineage INTEGER NOT NULL, digest TEXT NOT NULL, committed_at REAL NOT NULL, rolled_back_by INTEGER) STRICT;
CREATE TABLE reached (epoch INTEGER NOT NULL, prompt_id TEXT NOT NULL, attempt INTEGER NOT NULL, stage TEXT NOT NULL,
    at_step INTEGER NOT NULL, step INTEGER NOT NULL, lineage INTEGER NOT NULL, rolled_back_by INTEGER) STRICT;
CREATE TABLE ends (epoch INTEGER NOT NULL, prompt_id TEXT NOT NULL, attempt INTEGER NOT NULL, num_samples INTEGER,
    num_tokens INTEGER, min_version INTEGER, max_version INTEGER, reward_mean REAL, reason TEXT,
    step INTEGER NOT NULL, lineage INTEGER NOT NULL, rolled_back_by INTEGER) STRICT;
CREATE TABLE checkpoints (step INTEGER NOT NULL, lineage INTEGER NOT NULL, rolled_back_by INTEGER) STRICT;
CREATE UNIQUE INDEX one_step ON steps (step) WHERE rolled_back_by IS NULL;
CREATE UNIQUE INDEX one_end ON ends (epoch, prompt_id) WHERE rolled_back_by IS NULL;
CREATE INDEX ends_of_step ON ends (step);
CREATE INDEX attempts ON reached (epoch, prompt_id);
"""
END_COLUMNS = "epoch, prompt_id, attempt, num_samples, num_tokens, min_version, max_version, reward_mean, reason"


@dataclass(frozen=True)
class RunFacts:
    """What a run is about. A resume may change max_staleness (each step keeps its own); the rest must stay."""

    prompt_ids: tuple[str, ...]  # the training rows, in the order of the data
    samples_per_prompt: int
    prompts_per_step: int
    seed: int
    max_staleness: int = 0
    rows_digest: str = ""  # of the rows' token ids and answers
    model_digest: str = ""  # of the model that training began with


@dataclass(frozen=True)
class TrainedGroup:
    epoch: int
    prompt_id: str
    attempt: int
    num_samples: int
    num_tokens: int
    min_version: int  # oldest weight version among its tokens
    max_version: int
    reward_mean: float


@dataclass(frozen=True)
class DroppedGroup:
    epoch: int
    prompt_id: str
    attempt: int
    reason: str


@dataclass(frozen=True)
class Reached:
    """A group that got as far as `stage` during loop step `at_step`; attempts that died leave only such rows."""

    epoch: int
    prompt_id: str
    attempt: int
    stage: Stage
    at_step: int


def check_group(group: TrainedGroup, facts: RunFacts, version: int) -> None:
    """RunBroken where a trained group breaks the run's promises; `version` is what its step published."""
    if group.num_samples != facts.samples_per_prompt:
        raise RunBroken(f"group {id_of(group)} must have {facts.samples_per_prompt} samples, got {group.num_samples}")
    oldest, newest = version - 1 - facts.max_staleness, version - 1
    if not oldest <= group.min_version <= group.max_version <= newest:
        raise RunBroken(
            f"group {id_of(group)} must have tokens of versions {oldest} to {newest} "
            f"(max_staleness {facts.max_staleness}), got {group.min_version} to {group.max_version}"
        )
    if not math.isfinite(group.reward_mean):
        raise RunBroken(f"group {id_of(group)} must have a finite reward_mean, got {group.reward_mean}")


def end_of(group: TrainedGroup | DroppedGroup) -> tuple:
    """The columns END_COLUMNS of a group, in Python's own types (SQLite would store numpy's as bytes)."""
    where = (int(group.epoch), str(group.prompt_id), int(group.attempt))
    if isinstance(group, DroppedGroup):
        return (*where, None, None, None, None, None, str(group.reason))
    counts = (group.num_samples, group.num_tokens, group.min_version, group.max_version)
    return (*where, *map(int, counts), float(group.reward_mean), None)


def id_of(group: TrainedGroup | DroppedGroup | tuple) -> str:
    """The group's id in the run."""
    epoch, prompt_id, attempt = group[:3] if isinstance(group, tuple) else (group.epoch, group.prompt_id, group.attempt)
    return f"{epoch}:{prompt_id}:{attempt}"


def digest_of_step(step: int, version: int, ends: Iterable[tuple]) -> str:
    """Fingerprint of a step's record: the audit notices a row changed, added or taken away afterwards."""
    return hashlib.sha256(json.dumps([step, version, [list(end) for end in ends]]).encode()).hexdigest()


def digest_of_ids(prompt_ids: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()


def facts_as_text(facts: RunFacts) -> dict[str, str]:
    return {
        "num_prompts": str(len(facts.prompt_ids)),
        "prompts_digest": digest_of_ids(facts.prompt_ids),
        "samples_per_prompt": str(facts.samples_per_prompt),
        "prompts_per_step": str(facts.prompts_per_step),
        "seed": str(facts.seed),
        "rows_digest": facts.rows_digest,
        "model_digest": facts.model_digest,
    }
