"""The plan: what cannot work on this machine is refused before Ray starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.config import parse_config
from core.errors import UserError
from core.machine import read_machine
from core.plan import GIB, MIN_DISK_BYTES, MIN_SHM_BYTES, check_run_dir, make_plan

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_run_dir_that_is_or_lies_in_a_file_is_refused(tmp_path, inside):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run_dir must be a folder or a name for a new one"):
        check_run_dir(tmp_path / "file" / inside)


def test_a_new_run_dir_with_blanks_and_letters_of_any_language_is_taken(tmp_path):
    check_run_dir(tmp_path / "a b" / "é漢")


def test_more_memory_than_the_machine_has_is_refused_with_both_numbers(tmp_path: Path):
    machine = replace(
        read_machine(tmp_path),
        num_cores=8,
        memory_total_bytes=8 * GIB,
        memory_bytes=8 * GIB,
        shm_free_bytes=MIN_SHM_BYTES,
        disk_free_bytes=MIN_DISK_BYTES,
    )
    tree = {"num_steps": 1, "run_dir": str(tmp_path), "rollout": {"kv_cache_bytes": 100 * GIB}}
    plan = make_plan(parse_config(tree, "here"), machine, tmp_path, 16, 1)
    with pytest.raises(UserError, match=r"memory must be at least about 1\d\d\.\d GiB, got 8\.0 GiB \(rollout 1 x 10"):
        plan.check(machine)
