"""The registry: one truth on disk, whatever is killed, and no change on an epoch that has passed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.errors import RunBroken, UserError
from serve.artefacts.artefact import Origin, artefacts_folder, store
from serve.registry import LostRace, Registry, Routing

pytestmark = pytest.mark.fast
CHECKOUT = Path(__file__).parents[2]


def add_version(serve_dir: Path, name: str) -> str:
    """The digest of an artefact that holds a few bytes."""
    return store(serve_dir, lambda folder: (folder / "a.safetensors").write_text(name) and None, Origin(name)).digest


@pytest.fixture
def versions(tmp_path) -> list[str]:
    return [add_version(tmp_path, f"version {number}") for number in range(3)]


def test_a_new_registry_serves_nothing(tmp_path):
    assert Registry(tmp_path).routing() == Routing(0, None, None, 0.0)
    assert Registry(tmp_path).history() == []


def test_a_promotion_and_a_rollback(tmp_path, versions):
    first, second, _ = versions
    registry = Registry(tmp_path)
    assert registry.compare_and_set(0, "first version", stable=first) == Routing(1, first, None, 0.0)
    assert registry.compare_and_set(1, "canary", canary=second, share=0.05) == Routing(2, first, second, 0.05)
    promoted = registry.compare_and_set(2, "all steps passed", stable=second, canary=None)
    assert promoted == Routing(3, second, None, 0.0, previous=first)
    assert registry.rollback(3, "a person asked") == Routing(4, first, None, 0.0)
    assert Registry(tmp_path).routing() == Routing(4, first, None, 0.0)
    reasons = [(transition.routing.epoch, transition.reason) for transition in Registry(tmp_path).history()]
    assert reasons == [(1, "first version"), (2, "canary"), (3, "all steps passed"), (4, "a person asked")]


def test_a_canary_that_is_taken_away_takes_its_share_along(tmp_path, versions):
    registry = Registry(tmp_path)
    registry.compare_and_set(0, "first", stable=versions[0])
    registry.compare_and_set(1, "canary", canary=versions[1], share=0.5)
    assert registry.compare_and_set(2, "errors", canary=None) == Routing(3, versions[0], None, 0.0)


def test_there_is_no_rollback_from_the_first_version(tmp_path, versions):
    registry = Registry(tmp_path)
    registry.compare_and_set(0, "first", stable=versions[0])
    with pytest.raises(UserError, match="must have a previous stable version to go to"):
        registry.rollback(1, "no reason")


def test_a_change_decided_on_an_old_epoch_loses(tmp_path, versions):
    registry = Registry(tmp_path)
    registry.compare_and_set(0, "first", stable=versions[0])
    with pytest.raises(LostRace, match=r"must still be at epoch 0, got 1 .*last: first"):
        registry.compare_and_set(0, "the other first", stable=versions[1])
    with pytest.raises(LostRace):
        registry.rollback(7, "from the future")
    assert registry.routing() == Routing(1, versions[0], None, 0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canary": "first"}, "canary must be another version than stable"),
        ({"canary": "second", "share": 1.5}, r"share must be 0 to 1, got 1\.5"),
        ({"canary": "second", "share": float("nan")}, "share must be 0 to 1, got nan"),
        ({"share": 0.5}, "share must be 0 where there is no canary"),
        ({"canary": "second", "stable": None}, "a canary must have a stable version beside it"),
        ({"stable": "../../etc"}, "must be a digest of 64 hex digits"),
        ({"stable": "f" * 64}, "must be the digest of a whole artefact"),
        ({"weight": 1}, "must be of stable, canary or share, got weight"),
        ({}, "got nothing"),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(tmp_path, versions, changes, words):
    registry = Registry(tmp_path)
    before = registry.compare_and_set(0, "first", stable=versions[0])
    named = {"first": versions[0], "second": versions[1]}
    with pytest.raises(UserError, match=words):
        registry.compare_and_set(1, "mistake", **{key: named.get(value, value) for key, value in changes.items()})
    assert registry.routing() == before
    assert len(registry.history()) == 1


def test_a_damaged_artefact_never_serves(tmp_path, versions):
    (artefacts_folder(tmp_path) / versions[1] / "a.safetensors").write_text("version 7")
    registry = Registry(tmp_path)
    with pytest.raises(UserError, match=r"stable must be .* does not match its sha256"):
        registry.compare_and_set(0, "first", stable=versions[1])
    registry.compare_and_set(0, "first", stable=versions[0])
    registry.compare_and_set(1, "second", stable=versions[2])
    (artefacts_folder(tmp_path) / versions[0] / "a.safetensors").unlink()
    with pytest.raises(UserError, match=r"previous must be .* is missing"):
        registry.rollback(2, "back")
    assert registry.routing().stable == versions[2]


def test_a_registry_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, versions):
    registry = Registry(tmp_path)
    registry.compare_and_set(0, "first", stable=versions[0])
    for text in ("", "[]", '{"format": 1}', '{"format": 2}'):
        (tmp_path / "registry.json").write_text(text)
        with pytest.raises(RunBroken, match=r"registry\.json must be"):
            registry.routing()


@pytest.mark.parametrize("torn", [b"", b'{"routing": {"epo', b"\0" * 40])
def test_a_torn_log_is_completed_by_the_next_change(tmp_path, versions, torn):
    registry = Registry(tmp_path)
    for epoch in range(3):
        registry.compare_and_set(epoch, f"change {epoch + 1}", stable=versions[epoch])
    log = tmp_path / "registry.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:2]) + torn)  # as a kill before the third line, or in its middle, leaves it
    assert [transition.reason for transition in registry.history()] == ["change 1", "change 2", "change 3"]
    registry.compare_and_set(3, "change 4", stable=versions[0])
    assert [transition.routing.epoch for transition in registry.history()] == [1, 2, 3, 4]
    (tmp_path / "registry.json").unlink()  # the log alone holds all of them too
    assert [transition.routing.epoch for transition in registry.history()] == [1, 2, 3, 4]


WRITER = """
import sys
from pathlib import Path
from serve.registry import LostRace, Registry
registry, versions = Registry(Path(sys.argv[1])), sys.argv[3:]
print("ready", flush=True)
for number in range(int(sys.argv[2])):
    while True:
        now = registry.routing()
        try:
            registry.compare_and_set(now.epoch, f"{number}", stable=versions[now.epoch % len(versions)])
            break
        except LostRace:
            continue
"""


def start_writer(serve_dir: Path, num: int, versions: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(serve_dir), str(num), *versions]
    child = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_concurrent_writers_lose_no_change(tmp_path, versions):
    children = [start_writer(tmp_path, 25, versions) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    for child in children:
        child.stdout.close()  # type: ignore[union-attr]
    # Each of 2 writers made 25 changes, so that each of 50 epochs has one line
    assert Registry(tmp_path).routing().epoch == 50
    logged = [json.loads(line)["routing"]["epoch"] for line in (tmp_path / "registry.jsonl").read_text().splitlines()]
    assert logged == list(range(1, 51))


def test_a_kill_at_any_instant_leaves_a_whole_registry(tmp_path, versions):
    generator = random.Random(3)
    seen = 0
    for _ in range(12):
        child = start_writer(tmp_path, 10**6, versions)
        time.sleep(generator.uniform(0.0, 0.12))
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()  # type: ignore[union-attr]
        routing = Registry(tmp_path).routing()
        assert routing.epoch >= seen
        assert [transition.routing.epoch for transition in Registry(tmp_path).history()] == list(
            range(1, routing.epoch + 1)
        )
        seen = routing.epoch
    assert seen > 0
    after = Registry(tmp_path).compare_and_set(seen, "after all kills", stable=versions[0])
    assert after.epoch == seen + 1
