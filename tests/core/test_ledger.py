"""The ledger: what the writer refuses, what the audit proves, and that kill -9 at any moment breaks neither.

Data of most tests: 5 prompts, 2 a step, 2 samples each, so an epoch is steps of 2, 2 and 1 groups.
"""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from core.audit import audit, main
from core.checkpoint import newest_checkpoint, write_checkpoint
from core.config import Config, dump_config
from core.errors import RunBroken, UserError
from core.ledger import Ledger
from core.records import DroppedGroup, Reached, RunFacts, TrainedGroup

pytestmark = pytest.mark.fast

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


def test_two_epochs_committed_in_order_audit_clean(tmp_path, capsys):
    opened(tmp_path, 6).close()
    report = audit(tmp_path)
    # 6 steps of 2 2 1 2 2 1 groups: 10 ends, 2 whole epochs
    assert (report.num_steps, report.num_epochs, report.num_trained, report.problems) == (6, 2, 10, [])
    assert main(["audit", str(tmp_path)]) == 0
    assert "2 whole epochs of 5 prompts" in capsys.readouterr().out


def test_a_step_is_committed_once_and_in_order(tmp_path):
    with opened(tmp_path, 2) as ledger:
        for step in (1, 3):
            with pytest.raises(RunBroken, match=f"next step to commit must be 2, got {step}"):
                ledger.commit(step, 9, [trained(0, "f", 9)])


def test_a_prompt_ends_once_in_an_epoch_and_a_refused_step_leaves_nothing(tmp_path):
    with opened(tmp_path, 2) as ledger:
        with pytest.raises(RunBroken, match=r"group 0:b:c:4 must end once.*ended at step 0"):
            ledger.commit(2, 3, [trained(0, "f", 3)], [DroppedGroup(0, "b:c", 4, "stale")])
        assert ledger.num_steps == 2
        assert "f" not in ledger.ended(0)
        ledger.commit(2, 3, [trained(0, "f", 3)])  # the same step, right this time
    assert audit(tmp_path).problems == []


def test_a_group_with_another_number_of_samples_is_refused(tmp_path):
    with opened(tmp_path) as ledger, pytest.raises(RunBroken, match=r"0:a:0 must have 2 samples, got 3"):
        ledger.commit(0, 1, [trained(0, "a", 1, num_samples=3)])


def test_tokens_older_than_allowed_or_newer_than_the_step_are_refused(tmp_path):
    facts = RunFacts(IDS, 2, 2, 7, max_staleness=1)
    with opened(tmp_path, facts=facts) as ledger:
        # a step publishing version 5 trains weights 4: tokens of 3 and 4 may be in it with max_staleness 1
        for low, high in ((2, 3), (4, 5), (4, 3)):
            with pytest.raises(RunBroken, match=f"versions 3 to 4 .max_staleness 1., got {low} to {high}"):
                ledger.commit(0, 5, [TrainedGroup(0, "a", 0, 2, 9, low, high, 0.0)])
        ledger.commit(0, 5, [TrainedGroup(0, "a", 0, 2, 9, 3, 4, 0.0), trained(0, "b:c", 5)])
    assert audit(tmp_path).problems == []


def test_a_drop_needs_a_reason_and_counts_as_an_end(tmp_path, capsys):
    with opened(tmp_path) as ledger:
        with pytest.raises(RunBroken, match="must have a reason"):
            ledger.commit(0, 1, [trained(0, "a", 1)], [DroppedGroup(0, "b:c", 0, "")])
        ledger.commit(0, 1, [trained(0, "a", 1)], [DroppedGroup(0, "b:c", 0, "too old")])
        assert ledger.ended(0) == {"a", "b:c"}
    assert audit(tmp_path).dropped == {"too old": 1}
    assert main(["audit", str(tmp_path)]) == 0
    assert "too old 1" in capsys.readouterr().out


def test_numbers_from_numpy_are_stored_as_numbers(tmp_path):
    one = np.int64(1)
    with opened(tmp_path) as ledger:
        row = TrainedGroup(np.int64(0), "a", np.int64(0), np.int64(2), np.int32(9), one - 1, one - 1, np.float32(0.5))
        ledger.commit(0, 1, [row, trained(0, "b:c", 1)])
    assert audit(tmp_path).problems == []
    with pytest.raises(RunBroken, match="finite reward_mean, got nan"), opened(tmp_path) as ledger:
        ledger.commit(1, 2, [TrainedGroup(0, "d", 0, 2, 9, 1, 1, float("nan"))])


def test_versions_are_never_given_twice_not_even_over_restarts_and_roll_backs(tmp_path):
    with opened(tmp_path, 3) as ledger:  # claims 1 2 3
        assert ledger.next_version() == 4
    with opened(tmp_path) as ledger:
        ledger.roll_back(1)
        assert ledger.next_version() == 5
        with pytest.raises(RunBroken, match="must be above 3, got 2"):
            ledger.commit(1, 2, [trained(0, "d", 2)])


def test_a_start_without_a_checkpoint_after_a_kill_gives_the_first_weights_a_new_version(tmp_path):
    with opened(tmp_path) as ledger:
        assert ledger.version_at_start() == 0
        assert ledger.next_version() == 1  # claimed for step 0, then the kill
    with opened(tmp_path) as ledger:
        assert ledger.roll_back(0) == 0
        assert ledger.version_at_start() == 2
        version = ledger.next_version()
        ledger.commit(0, version, [trained(*where, version) for where in due(0)])  # sampled under version 2
    assert audit(tmp_path).problems == []


def test_a_roll_back_keeps_its_rows_and_the_redone_steps_count_once(tmp_path):
    with opened(tmp_path, 5) as ledger:
        # steps 2 3 4 held 1 2 2 groups
        assert ledger.roll_back(2) == 5
        assert ledger.num_steps == 2
        assert ledger.ended(0) == {"a", "b:c", "d", "e"}
        assert ledger.ended(1) == frozenset()
        assert ledger.next_attempts(1) == {"a": 1, "b:c": 1, "d": 1, "e": 1}
        for step in range(2, 6):
            commit(ledger, step)
        assert ledger.roll_back(6) == 0
    report = audit(tmp_path)
    assert (report.num_trained, report.num_rolled_back, report.num_lineages, report.problems) == (10, 5, 2, [])


def test_a_resume_that_changes_data_or_sizes_names_what_changed(tmp_path):
    opened(tmp_path, 1).close()
    changes = {
        "samples_per_prompt was 2, is 3": RunFacts(IDS, 3, 2, 7),
        "prompts_per_step was 2, is 4": RunFacts(IDS, 2, 4, 7),
        "seed was 7, is 8": RunFacts(IDS, 2, 2, 8),
        "num_prompts was 5, is 4": RunFacts(IDS[:4], 2, 2, 7),
        "prompts_digest was": RunFacts(IDS[::-1], 2, 2, 7),
    }
    for sentence, facts in changes.items():
        with pytest.raises(UserError, match=sentence), Ledger(tmp_path) as ledger:
            ledger.open_run(facts)
    with Ledger(tmp_path) as ledger:
        ledger.open_run(RunFacts(IDS, 2, 2, 7, max_staleness=3))  # may change: each step keeps its own


def test_two_rows_with_one_id_are_refused(tmp_path):
    with pytest.raises(UserError, match="got 'a' 2 times"), Ledger(tmp_path) as ledger:
        ledger.open_run(RunFacts(("a", "b", "a"), 2, 2, 7))


def test_a_second_writer_is_refused_by_name_and_the_lock_ends_with_its_holder(tmp_path):
    program = (
        f"from core.ledger import Ledger; from pathlib import Path; import time; l = Ledger(Path({str(tmp_path)!r}))"
    )
    held = "print('held', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", f"{program}; {held}"], cwd=CHECKOUT, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {child.pid} is writing"):
            Ledger(tmp_path)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    Ledger(tmp_path).close()


def test_a_second_writer_in_the_same_process_is_refused_too(tmp_path):
    with opened(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} is writing"):
        Ledger(tmp_path)


def test_a_file_that_is_no_ledger_is_refused_in_one_sentence_and_frees_the_lock(tmp_path):
    write_config(tmp_path)
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, not at all" * 100)
    for _ in range(2):
        with pytest.raises(UserError, match="must be a ledger, got a file SQLite cannot open"):
            Ledger(tmp_path)
    with pytest.raises(UserError, match="corrupt"):
        audit(tmp_path)


def test_a_checkpoint_never_claims_more_steps_than_were_committed(tmp_path):
    with opened(tmp_path, 2) as ledger:
        ledger.checkpoint(2)
        with pytest.raises(RunBroken, match="at most 2 committed steps, got 3"):
            ledger.checkpoint(3)
        with pytest.raises(RunBroken, match="different runs"):
            ledger.roll_back(3)
    save(tmp_path, 2)
    assert audit(tmp_path).problems == []
    broken = save(tmp_path, 4)
    assert "checkpoint 4 claims more steps than the 2 committed" in problems(tmp_path)
    (broken / "w.bin").write_bytes(b"")  # half a checkpoint claims nothing
    assert audit(tmp_path).problems == []


def test_starting_over_silently_is_refused_where_a_saved_checkpoint_went_missing(tmp_path):
    with opened(tmp_path, 2) as ledger:
        ledger.checkpoint(2)
        with pytest.raises(RunBroken, match="got none though step 2 was saved"):
            ledger.roll_back(0)
        assert ledger.num_steps == 2


def test_the_audit_names_a_doubled_group(tmp_path, capsys):
    opened(tmp_path, 3).close()
    copy = "INSERT INTO ends SELECT 0, 'a', 1, 2, 9, 1, 1, 0.5, NULL, 1, 0, NULL"
    tamper(tmp_path, "DROP INDEX one_end", copy)
    assert main(["audit", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "doubled, ended more than once: 0:a" in out
    assert "step 1 must end 2 groups, got 3" in out


def test_the_audit_names_a_lost_group(tmp_path, capsys):
    opened(tmp_path, 3).close()
    tamper(tmp_path, "DELETE FROM ends WHERE prompt_id = 'b:c'")
    assert main(["audit", str(tmp_path)]) == 1
    assert "lost, neither trained nor dropped in a finished epoch: 0:b:c" in capsys.readouterr().out


def test_the_audit_names_ten_lost_groups_and_counts_the_rest(tmp_path):
    ids = tuple(f"p{n}" for n in range(12))
    write_config(tmp_path, prompts_per_step=12)
    with Ledger(tmp_path) as ledger:
        ledger.open_run(RunFacts(ids, 2, 12, 7))
        ledger.commit(0, 1, [trained(0, name, 1) for name in ids])
    tamper(tmp_path, "DELETE FROM ends")
    assert "0:p9 and 2 more" in problems(tmp_path)


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("UPDATE ends SET num_tokens = 10 WHERE prompt_id = 'a'", "step 0 of lineage 0 was changed"),
        ("UPDATE ends SET prompt_id = 'zz' WHERE prompt_id = 'a'", "unknown to the data: 0:zz:0"),
        ("UPDATE ends SET num_samples = 1 WHERE prompt_id = 'a'", "must have 2 samples, have another number: 0:a:0"),
        ("UPDATE ends SET min_version = -1 WHERE prompt_id = 'a'", "older or newer than allowed: 0:a:0"),
        ("UPDATE ends SET max_version = 1 WHERE prompt_id = 'a'", "older or newer than allowed: 0:a:0"),
        ("UPDATE ends SET epoch = 1 WHERE prompt_id = 'a'", "of an epoch the run had not reached: 1:a:0"),
        ("UPDATE ends SET rolled_back_by = 1 WHERE prompt_id = 'a'", "or rolled back without it: 0:a:0"),
        ("UPDATE ends SET reason = '' WHERE prompt_id = 'a'", "dropped without a reason: 0:a:0"),
        ("DELETE FROM steps WHERE step = 1", "missing or doubled: 1"),
        ("UPDATE steps SET version = 1 WHERE step = 2", "version went from 2 to 1 at step 2"),
        ("DELETE FROM prompts WHERE prompt_id = 'f'", "not the one the run began with"),
        ("UPDATE facts SET value = '9' WHERE name = 'seed'", "seed is 7 in config.yaml and 9 in the ledger"),
        ("INSERT INTO checkpoints VALUES (4, 0, NULL)", "checkpoint 4 claims more steps"),
    ],
)
def test_the_audit_notices_a_changed_ledger(tmp_path, statement, sentence):
    opened(tmp_path, 3).close()
    tamper(tmp_path, statement)
    assert sentence in problems(tmp_path)


def test_a_group_overtaken_at_the_border_of_an_epoch_is_late_and_then_lost(tmp_path):
    # max_staleness 1: step 2 (last of epoch 0) trains epoch 1's "a" in place of 0:f; step 3 must then bring 0:f
    write_config(tmp_path, max_staleness=1)
    with Ledger(tmp_path) as ledger:
        ledger.open_run(RunFacts(IDS, 2, 2, 7, max_staleness=1))
        plan = [[(0, "a"), (0, "b:c")], [(0, "d"), (0, "e")], [(1, "a")]]
        for step, groups in enumerate(plan):
            ledger.commit(step, step + 1, [trained(*where, step + 1) for where in groups])
        report = audit(tmp_path)  # while the ledger is open for writing
        assert (report.num_late, report.problems) == (1, [])
        ledger.commit(3, 4, [trained(1, "b:c", 4), trained(1, "d", 4)])
        assert "lost, neither trained nor dropped in a finished epoch: 0:f" in problems(tmp_path)


@pytest.mark.parametrize("content", ["missing", "empty folder", "no config", "no run", "cut"])
def test_what_is_no_run_folder_ends_the_audit_with_status_2_and_one_sentence(tmp_path, capsys, content):
    run_dir = tmp_path / "run"
    if content != "missing":
        run_dir.mkdir()
    if content in ("no config", "cut"):
        opened(run_dir, 3).close()
    if content == "no config":
        (run_dir / "config.yaml").unlink()
    if content == "no run":
        write_config(run_dir)
        Ledger(run_dir).close()
    if content == "cut":
        os.truncate(run_dir / "ledger.sqlite", 6000)
    assert main(["audit", str(run_dir)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_the_audit_writes_nothing_into_the_ledger(tmp_path):
    opened(tmp_path, 3).close()
    before = (tmp_path / "ledger.sqlite").read_bytes()
    audit(tmp_path)
    assert (tmp_path / "ledger.sqlite").read_bytes() == before


def test_a_full_disk_names_the_ledger_and_the_refused_step_leaves_nothing(tmp_path):
    opened(tmp_path, 1).close()
    # rows of ids 20 kB long: the log of changes passes 256 KiB a file after a few steps
    program = f"""
from pathlib import Path
from core.ledger import *
with Ledger(Path({str(tmp_path)!r})) as ledger:
    ledger.open_run(RunFacts({IDS!r}, 2, 2, 7))
    asked = [Reached(0, "x" * 20_000, 0, "asked", 1)] * 20
    ledger.commit(1, 2, [TrainedGroup(0, name, 0, 2, 9, 1, 1, 0.5) for name in "de"], reached=asked)
"""
    limited = ["bash", "-c", 'ulimit -f 256; exec "$@"', "limited", sys.executable, "-c", program]
    ended = subprocess.run(limited, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "ledger.sqlite could not be written" in last
    assert "bytes are free there" in last
    with opened(tmp_path, 3) as ledger:
        assert ledger.num_steps == 3
    assert audit(tmp_path).problems == []


WRITER = """
from pathlib import Path
from core.checkpoint import newest_checkpoint, write_checkpoint
from core.ledger import Ledger
from core.records import Reached, RunFacts, TrainedGroup
run_dir, ids = Path({run_dir!r}), {ids!r}
with Ledger(run_dir) as ledger:
    ledger.open_run(RunFacts(ids, 2, 2, 7))
    found = newest_checkpoint(run_dir)
    ledger.roll_back(found.step if found else 0)
    while True:
        step, version = ledger.num_steps, ledger.next_version()
        epoch, place = divmod(step, 3)
        names = ids[2 * place : 2 * place + 2]
        groups = [TrainedGroup(epoch, name, 0, 2, 9, version - 1, version - 1, 0.5) for name in names]
        ledger.commit(step, version, groups, reached=[Reached(epoch, name, 0, "asked", step) for name in names])
        print("committed", flush=True)
        if (step + 1) % 3 == 0:
            write_checkpoint(run_dir, step + 1, lambda folder: (folder / "w.bin").write_bytes(b"w" * 64), keep=2)
            ledger.checkpoint(step + 1)
"""


def test_kill_9_at_random_moments_leaves_a_ledger_that_audits_clean_and_goes_on(tmp_path):
    write_config(tmp_path)
    chance = random.Random(3)
    program = WRITER.format(run_dir=str(tmp_path), ids=IDS)
    committed = []
    for _ in range(8):
        child = subprocess.Popen([sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE)
        try:
            assert child.stdout.readline() == b"committed\n"
            time.sleep(chance.uniform(0.0, 0.25))
            assert audit(tmp_path).problems == []  # while it writes
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        report = audit(tmp_path)
        assert report.problems == []
        committed.append(report.num_steps)
    assert min(committed) >= 1
    found = newest_checkpoint(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.roll_back(found.step if found else 0)
        for step in range(ledger.num_steps, committed[-1] + 3):
            commit(ledger, step)
    report = audit(tmp_path)
    assert (report.num_steps, report.problems) == (committed[-1] + 3, [])
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
    assert audit(copy) == replace(report, run_dir=copy)  # from the files alone
