"""Small ledgers for the tests of the ledger and of its audit: 5 prompts, 2 a step, 2 samples each."""

import sqlite3
from pathlib import Path

from core.audit import audit
from core.checkpoint import write_checkpoint
from core.config import Config, dump_config
from core.ledger import Ledger
from core.records import Reached, RunFacts, TrainedGroup

IDS = ("a", "b:c", "d", "e", "f")  # ids may hold the separator of group ids
FACTS = RunFacts(prompt_ids=IDS, samples_per_prompt=2, prompts_per_step=2, seed=7)
CHECKOUT = Path(__file__).parents[2]


def write_config(run_dir: Path, **changes: object) -> None:
    tree = {"seed": 7, "prompts_per_step": 2, "num_steps": 100, "rollout": {"samples_per_prompt": 2}, **changes}
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(Config.model_validate(tree)))


def due(step: int) -> list[tuple[int, str]]:
    """(epoch, prompt id) of a step in the data's own order: rows 0 1 | 2 3 | 4."""
    epoch, place = divmod(step, 3)
    return [(epoch, name) for name in IDS[2 * place : 2 * place + 2]]


def trained(epoch: int, prompt_id: str, version: int, attempt: int = 0, num_samples: int = 2) -> TrainedGroup:
    """A group wholly sampled under the weights before those that `version` names."""
    return TrainedGroup(epoch, prompt_id, attempt, num_samples, 9, version - 1, version - 1, 0.5)


def commit(ledger: Ledger, step: int) -> None:
    version = ledger.next_version()
    groups = [trained(*where, version) for where in due(step)]
    asked = [Reached(*where, 0, stage, step) for where in due(step) for stage in ("asked", "sampled", "scored")]
    ledger.commit(step, version, groups, reached=asked)


def opened(run_dir: Path, num_steps: int = 0, facts: RunFacts = FACTS) -> Ledger:
    write_config(run_dir)
    ledger = Ledger(run_dir)
    ledger.open_run(facts)
    for step in range(ledger.num_steps, num_steps):
        commit(ledger, step)
    return ledger


def tamper(run_dir: Path, *statements: str) -> None:
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def problems(run_dir: Path) -> str:
    return "\n".join(audit(run_dir).problems)


def save(run_dir: Path, step: int) -> Path:
    return write_checkpoint(run_dir, step, lambda folder: (folder / "w.bin").write_bytes(b"w" * 64) and None, keep=9)
