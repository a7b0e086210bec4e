"""A kill at any instant of a rollout leaves neither version half done, and the next process carries it on."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.rollout.progress import Journal
from tests.serve.simulated import Behaviour, Scene, continued

pytestmark = pytest.mark.process
CHECKOUT = Path(__file__).parents[2]


class Killed(BaseException):
    """As of kill -9: nothing may catch it."""


@pytest.fixture
def no_power_cuts(monkeypatch) -> None:
    """Simulated kills lose nothing that was written; waiting for the disk would be most of their time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Reaper:
    """Counts the instants at which a kill makes a difference, and kills at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scene: Scene, place: int | None) -> None:
        self.num_places, self._place = 0, place
        scene.world.at = self.at
        for name in ("replace", "fsync"):
            monkeypatch.setattr(os, name, self._around(name, getattr(os, name)))

    def at(self, place: str) -> None:
        self.num_places += 1
        if self.num_places == self._place:
            raise Killed(place)

    def _around(self, name: str, real: Callable) -> Callable:
        def call(*arguments):
            self.at(f"before {name}")
            result = real(*arguments)
            self.at(f"after {name}")
            return result

        return call


def legal(scene: Scene) -> list[tuple[str | None, str | None, float]]:
    first, second, _ = scene.versions
    return [(first, None, 0.0), (first, second, 0.1), (first, second, 0.5), (second, None, 0.0)]


def killed_at(folder: Path, place: int | None, behaviour: Behaviour) -> tuple[Scene, int]:
    """The scene after a rollout that was killed at this place (None: never), and the number of places it had."""
    scene = Scene(folder)
    scene.world.behaviours[scene.versions[1]] = behaviour
    with pytest.MonkeyPatch.context() as monkeypatch:
        reaper = Reaper(monkeypatch, scene, place)
        try:
            scene.rollout().run(scene.versions[1])
        except Killed:
            assert place is not None
    scene.world.at = lambda place: None
    return scene, reaper.num_places


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [(Behaviour(), "drained"), (Behaviour(error_rate=0.5), "rolled_back")],
    ids=["good", "bad"],
)
def test_a_rollout_killed_at_any_instant_is_carried_on(tmp_path, no_power_cuts, behaviour, outcome):
    _, num_places = killed_at(tmp_path / "whole", None, behaviour)
    assert num_places > 40
    for place in range(1, num_places + 1):
        scene, _ = killed_at(tmp_path / str(place), place, behaviour)
        first, second, _ = scene.versions
        assert scene.who() in legal(scene), place
        end = scene.rollout().resume()
        if end is None:  # killed before the first transition was on disk
            assert scene.who() == (first, None, 0.0)
            continue
        assert (end.state, end.is_settled) == (outcome, True), place
        assert scene.who() == ((second if outcome == "drained" else first), None, 0.0), place
        assert scene.world.running == ({first, second} if outcome == "drained" else {first}), place
        assert scene.world.num_unserved == 0, place
        lines = scene.lines()
        assert [line["number"] for line in lines] == list(range(1, len(lines) + 1)), place
        assert all(line["reason"] for line in lines)
        assert lines[-1]["state"] == outcome


def test_a_resumed_rollout_that_is_killed_again_is_carried_on_too(tmp_path, no_power_cuts):
    generator = random.Random(5)
    _, num_places = killed_at(tmp_path / "whole", None, Behaviour())
    for number in range(25):
        scene, _ = killed_at(tmp_path / str(number), generator.randint(10, num_places), Behaviour())
        with pytest.MonkeyPatch.context() as monkeypatch:
            Reaper(monkeypatch, scene, generator.randint(1, num_places))
            try:
                scene.rollout().resume()
            except Killed:
                assert scene.who() in legal(scene)
        scene.world.at = lambda place: None
        end = scene.rollout().resume()
        assert end is not None
        assert (end.state, scene.who()) == ("drained", (scene.versions[1], None, 0.0))
        assert scene.world.num_unserved == 0


def test_a_rollback_killed_at_any_instant_is_carried_on(tmp_path, no_power_cuts):
    def rolled_back_at(folder: Path, place: int | None) -> tuple[Scene, int]:
        scene = Scene(folder)
        scene.rollout().run(scene.versions[1])
        with pytest.MonkeyPatch.context() as monkeypatch:
            reaper = Reaper(monkeypatch, scene, place)
            try:
                scene.rollout().rollback("a person asked")
            except Killed:
                assert place is not None
        scene.world.at = lambda place: None
        return scene, reaper.num_places

    whole, num_places = rolled_back_at(tmp_path / "whole", None)
    assert whole.who() == (whole.versions[0], None, 0.0)
    for place in range(1, num_places + 1):
        scene, _ = rolled_back_at(tmp_path / str(place), place)
        assert scene.who() in legal(scene)
        end = scene.rollout().resume()
        assert end is not None
        if end.state == "drained":  # killed before the rollback was on disk
            end = scene.rollout().rollback("a person asked again")
        assert (end.state, end.is_settled) == ("rolled_back", True)
        assert scene.who() == (scene.versions[0], None, 0.0)
        assert (scene.world.running, scene.world.num_unserved) == ({scene.versions[0]}, 0)


CONTROLLER = """
import functools
import sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[2])))
from tests.serve.simulated import continued

class Told:
    append = functools.partial(print, flush=True)

scene = continued(Path(sys.argv[1]))
scene.said = Told
while True:
    if scene.rollout().resume().state == "drained":
        scene.rollout().rollback("and back")
    scene.rollout().run(scene.versions[1])
"""


def test_a_controller_that_is_killed_leaves_what_another_carries_on(tmp_path):
    generator = random.Random(4)
    first = Scene(tmp_path)
    first.rollout().run(first.versions[1])
    seen = 0
    for _ in range(5):
        command = [sys.executable, "-c", CONTROLLER, str(tmp_path), str(CHECKOUT)]
        child = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(generator.randint(1, 15)):
            assert child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
        assert first.who() in legal(first)
        newest = Journal(first.registry).newest()
        assert newest is not None
        assert newest.number >= seen
        seen = newest.number
    assert seen > 5  # the first rollout had 5 transitions; the children made more
    end = continued(tmp_path).rollout().resume()
    assert end is not None
    assert end.is_settled
    lines = (tmp_path / "rollout.jsonl").read_bytes().splitlines()
    whole = [json.loads(line)["number"] for line in lines if line.startswith(b"{") and line.endswith(b"}")]
    assert whole == list(range(1, end.number + 1))
