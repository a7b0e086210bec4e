"""The ledger: what the writer refuses, what the audit proves, and that kill -9 at any moment breaks neither.

Data of most tests: 5 prompts, 2 a step, 2 samples each, so an epoch is steps of 2, 2 and 1 groups.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from core.audit import audit, main
from core.checkpoint import newest_checkpoint
from core.errors import RunBroken, UserError
from core.ledger import Ledger
from core.records import DroppedGroup, RunFacts, TrainedGroup
from tests.core.ledgers import CHECKOUT, IDS, commit, due, opened, problems, save, trained, write_config

pytestmark = pytest.mark.fast


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
        "rows_digest was , is other rows": RunFacts(IDS, 2, 2, 7, rows_digest="other rows"),
        "model_digest was , is other weights": RunFacts(IDS, 2, 2, 7, model_digest="other weights"),
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
