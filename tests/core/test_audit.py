"""The audit: what it proves of a run folder, and what it notices."""

import os

import pytest

from core.audit import audit, main
from core.ledger import Ledger
from core.records import RunFacts
from tests.core.ledgers import IDS, opened, problems, tamper, trained, write_config

pytestmark = pytest.mark.fast


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
        ("UPDATE steps SET step = 1000000000 WHERE step = 1", "missing or doubled: 1, 1000000000"),
        ("DELETE FROM prompts", "not the one the run began with"),
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


def test_a_fact_that_is_no_number_is_a_corrupt_ledger(tmp_path, capsys):
    opened(tmp_path, 1).close()
    tamper(tmp_path, "UPDATE facts SET value = 'x' WHERE name = 'lineage'")
    assert main(["audit", str(tmp_path)]) == 2
    assert "must be a whole ledger, got a corrupt one" in capsys.readouterr().err


def test_a_name_too_long_for_a_folder_is_one_sentence(capsys):
    assert main(["audit", "x" * 400]) == 2
    assert "must be given a run's folder" in capsys.readouterr().err
