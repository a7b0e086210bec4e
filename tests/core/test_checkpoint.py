"""Checkpoints: whole or not at all, and never a silent step 0."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.checkpoint import flaw, list_checkpoints, newest_checkpoint, write_checkpoint
from core.errors import DeadlineExceeded, RunBroken

pytestmark = pytest.mark.fast

CHECKOUT = Path(__file__).parents[2]


def fill(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 5000)
    (folder / "ranks").mkdir()
    (folder / "ranks" / "optimizer_0.bin").write_bytes(b"o" * 300)


def save(run_dir: Path, step: int, keep: int = 9) -> Path:
    return write_checkpoint(run_dir, step, fill, keep)


def steps(run_dir: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(run_dir)]


def cut_in_half(folder: Path) -> None:
    os.truncate(folder / "weights.bin", 2500)


def empty_a_file(folder: Path) -> None:
    os.truncate(folder / "weights.bin", 0)


def delete_a_file(folder: Path) -> None:
    (folder / "ranks" / "optimizer_0.bin").unlink()


def flip_a_byte(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 4999 + b"x")


def delete_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 40)


def put_something_else_in_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def nest_the_manifest_too_deep(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def list_no_file_in_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text(f'{{"format": 1, "step": {int(folder.name[5:])}, "files": {{}}}}')


def write_it_in_another_format(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def rename_it(folder: Path) -> None:
    folder.rename(folder.with_name("step_000006"))


BREAKAGES = {
    cut_in_half: "weights.bin must have 5000 bytes, got 2500",
    nest_the_manifest_too_deep: "manifest.json cannot be read (RecursionError)",
    list_no_file_in_the_manifest: "manifest.json lists no file",
    empty_a_file: "weights.bin must have 5000 bytes, got 0",
    delete_a_file: "optimizer_0.bin is missing",
    flip_a_byte: "weights.bin does not match its sha256",
    delete_the_manifest: "manifest.json is missing",
    cut_the_manifest: "manifest.json cannot be read",
    put_something_else_in_the_manifest: "manifest.json cannot be read",
    write_it_in_another_format: "its format must be 1, got 2",
    rename_it: "its manifest is that of step 4",
}


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_broken_newest_checkpoint_is_passed_over_with_a_warning(tmp_path, breakage):
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    breakage(newer)
    step, path, warnings = newest_checkpoint(tmp_path)
    assert (step, path) == (2, older)
    assert len(warnings) == 1
    assert BREAKAGES[breakage] in warnings[0]


def test_an_empty_later_folder_is_passed_over(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "step_000006").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found.step == 2
    assert "step_000006 is not whole: manifest.json is missing" in found.warnings[0]


def test_no_checkpoint_was_ever_completed_means_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / ".writing-step_000002-77").mkdir(parents=True)  # killed in its first save
    assert newest_checkpoint(tmp_path) is None


def test_only_broken_checkpoints_end_the_run_instead_of_step_0(tmp_path):
    for path in [save(tmp_path, step) for step in (2, 4)]:
        cut_in_half(path)
    with pytest.raises(RunBroken, match=r"got 2 broken \(step_000004: weights\.bin"):
        newest_checkpoint(tmp_path)


def test_a_whole_one_is_found_with_all_its_files_and_no_warning(tmp_path):
    path = save(tmp_path, 123)
    assert path.name == "step_000123"
    assert newest_checkpoint(tmp_path) == (123, path, [])
    assert sorted(p.name for p in path.rglob("*") if p.is_file()) == ["manifest.json", "optimizer_0.bin", "weights.bin"]


def test_numbers_and_not_names_say_which_is_newest(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    assert newest_checkpoint(tmp_path).step == 1_000_000


def test_the_newest_are_kept_and_stale_temporary_folders_go(tmp_path):
    (tmp_path / "checkpoints" / ".writing-step_000001-77").mkdir(parents=True)
    for step in (2, 4, 6):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [6, 4]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000004", "step_000006"]


def test_a_broken_one_does_not_take_the_place_of_a_whole_one(tmp_path):
    for step in (2, 4):
        save(tmp_path, step)
    cut_in_half(tmp_path / "checkpoints" / "step_000004")
    save(tmp_path, 6, keep=2)
    assert steps(tmp_path) == [6, 2]


def test_a_later_checkpoint_of_steps_rolled_back_is_removed(tmp_path):
    for step in (2, 8):
        save(tmp_path, step)
    save(tmp_path, 4)
    assert newest_checkpoint(tmp_path).step == 4
    assert steps(tmp_path) == [4, 2]


def test_a_broken_one_of_the_same_step_is_replaced(tmp_path):
    cut_in_half(save(tmp_path, 4))
    assert flaw(save(tmp_path, 4)) is None
    assert steps(tmp_path) == [4]


def test_the_same_step_saved_again_holds_the_new_files(tmp_path):
    save(tmp_path, 4)
    save(tmp_path, 4)  # the same bytes: left alone
    path = write_checkpoint(tmp_path, 4, lambda folder: (folder / "weights.bin").write_text("new") and None, 1)
    assert (path / "weights.bin").read_text() == "new"
    assert os.listdir(tmp_path / "checkpoints") == ["step_000004"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_save_that_fails_names_path_and_room_and_leaves_the_earlier_one(tmp_path, error):
    earlier = save(tmp_path, 2, keep=1)

    def half(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises(RunBroken, match=r"step_000004 could not be written: .*bytes are free there") as caught:
        write_checkpoint(tmp_path, 4, half, keep=1)
    assert caught.value.__cause__ is error
    assert newest_checkpoint(tmp_path) == (2, earlier, [])
    assert os.listdir(tmp_path / "checkpoints") == ["step_000002"]


def test_a_deadline_within_the_save_keeps_its_own_sentence(tmp_path):
    def late(folder: Path) -> None:
        raise DeadlineExceeded("rank 1 was waited for 600 s")

    with pytest.raises(DeadlineExceeded, match="rank 1 was waited for"):
        write_checkpoint(tmp_path, 4, late, keep=1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where a folder must be")
    with pytest.raises(RunBroken, match=r"checkpoints/step_000002 could not be written"):
        save(tmp_path, 2)


def test_nothing_and_links_are_no_checkpoint(tmp_path):
    with pytest.raises(RunBroken, match="at least one file, got none"):
        write_checkpoint(tmp_path, 2, lambda folder: None, 1)
    with pytest.raises(RunBroken, match="plain files, got the link"):
        write_checkpoint(tmp_path, 2, lambda folder: (folder / "a").symlink_to("/etc/hostname"), 1)
    with pytest.raises(ValueError, match="keep at least 1, got 2 and 0"):
        save(tmp_path, 2, keep=0)


def run_child(program: str, *, limit_kib: int | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program]
    if limit_kib is not None:
        command = ["bash", "-c", f'ulimit -f {limit_kib}; exec "$@"', "limited", *command]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)


SAVE_2_MIB = """
from pathlib import Path
from core.checkpoint import write_checkpoint
write_checkpoint(Path({run_dir!r}), 4, lambda folder: (folder / "weights.bin").write_bytes(bytes(2 << 20)) and None, 1)
"""


def test_a_file_larger_than_the_system_lets_it_be_ends_with_the_cause_and_the_earlier_one_loads(tmp_path):
    save(tmp_path, 2)
    ended = run_child(SAVE_2_MIB.format(run_dir=str(tmp_path)), limit_kib=1024)
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "core.errors.RunBroken: checkpoint" in last
    assert "File too large" in last
    assert newest_checkpoint(tmp_path).step == 2
    assert newest_checkpoint(tmp_path).warnings == []


SAVE_FOR_EVER = """
import itertools
from pathlib import Path
from core.checkpoint import newest_checkpoint, write_checkpoint
def fill(folder):
    for name in "abc":
        (folder / name).write_bytes(bytes(100_000))
run_dir = Path({run_dir!r})
first = newest_checkpoint(run_dir).step + 1
for step in itertools.count(first):
    write_checkpoint(run_dir, step, fill, keep=2)
    print("saved", flush=True)
"""


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_checkpoint(tmp_path, kind):
    chance = random.Random(5)
    program = SAVE_FOR_EVER.format(run_dir=str(tmp_path))
    save(tmp_path, 1)
    before = 1
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE)
        try:
            assert child.stdout.readline() == b"saved\n"
            time.sleep(chance.uniform(0.0, 0.1))
        finally:
            child.send_signal(kind)
            child.communicate()
        found = newest_checkpoint(tmp_path)
        assert found.step > before
        assert found.warnings == []
        before = found.step
