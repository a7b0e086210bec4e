"""The 4-bit version made behind what serves: when it takes over, when it does not; and what a start does with a canary.

Quantiser, judge and Ray Serve are stood in for: who takes over, and when, is what is tested. Registry and artefacts are
real.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest

from core.errors import RunBroken
from serve.artefacts.artefact import Artefact, Origin, load_artefact, record, store
from serve.config import ServeConfig
from serve.gate.tasks import NO_TASKS
from serve.registry import Registry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray Serve's own imports
    from serve import application, preparation, quantisation

pytestmark = pytest.mark.fast


def add_version(serve_dir: Path, name: str, **origin: Any) -> Artefact:
    return store(serve_dir, lambda folder: (folder / "a.safetensors").write_text(name) and None, Origin(name, **origin))


class Stage:
    """A serving folder with a stable version in full precision, and one in 4 bits made from it."""

    def __init__(self, serve_dir: Path) -> None:
        self.config = ServeConfig(serve_dir=serve_dir)
        self.full = add_version(serve_dir, "full")
        self.small = add_version(serve_dir, "small", parent=self.full.digest, quantization="awq-w4a16-g64")
        self.other = add_version(serve_dir, "other")
        self.registry = Registry(serve_dir)
        self.registry.compare_and_set(0, "served at start", stable=self.full.digest)
        self.said: list[str] = []
        self.started: list[str] = []

    def replace_behind(self, monkeypatch: pytest.MonkeyPatch, while_it_is_made: Any = lambda _: None) -> None:
        """Runs a Quantisation to its end."""
        behind = quantisation.Quantisation(self.config, self.registry, self.said.append)

        def quantised(full: Artefact, *_: Any) -> Artefact:
            assert full.digest == self.full.digest
            while_it_is_made(behind)
            return self.small

        monkeypatch.setattr(quantisation, "quantised", quantised)
        monkeypatch.setattr(quantisation, "start_version", lambda _, digest: self.started.append(digest))
        behind.start()
        behind._thread.join(20)
        assert not behind._thread.is_alive()


@pytest.fixture
def stage(tmp_path) -> Stage:
    return Stage(tmp_path)


def test_the_quantised_version_takes_over_once_it_runs(stage, monkeypatch):
    stage.replace_behind(monkeypatch)
    assert stage.started == [stage.small.digest]
    routing = stage.registry.routing()
    assert (routing.stable, routing.previous, routing.epoch) == (stage.small.digest, stage.full.digest, 2)
    assert stage.said[-1].startswith(f"serving version {stage.small.digest[:12]} from now on")


def test_a_version_promoted_meanwhile_keeps_its_place(stage, monkeypatch):
    stage.replace_behind(
        monkeypatch, lambda _: stage.registry.compare_and_set(1, "a person's", stable=stage.other.digest)
    )
    assert stage.registry.routing().stable == stage.other.digest
    assert "another version took over" in stage.said[-1]


def test_a_version_that_does_not_start_changes_nothing(stage, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory left")

    behind = quantisation.Quantisation(stage.config, stage.registry, stage.said.append)
    monkeypatch.setattr(quantisation, "quantised", lambda *_: stage.small)
    monkeypatch.setattr(quantisation, "start_version", fail)
    behind.start()
    behind._thread.join(20)
    assert stage.registry.routing().stable == stage.full.digest
    assert stage.said[-1] == "not quantised: RuntimeError: no memory left"


def test_nothing_is_put_in_place_once_the_server_ends(stage, monkeypatch):
    stage.replace_behind(monkeypatch, lambda behind: behind.end())
    assert (stage.started, stage.said) == ([], [])
    assert stage.registry.routing().stable == stage.full.digest


def test_a_rollout_under_way_is_left_alone(stage, monkeypatch):
    stage.registry.compare_and_set(1, "canary", canary=stage.other.digest, share=0.1)
    stage.replace_behind(monkeypatch, lambda _: pytest.fail("nothing must be quantised"))
    assert (stage.started, stage.said) == ([], [])


def passing(artefact: Artefact, config: ServeConfig, passed: bool) -> None:
    record(artefact, gate={"passed": passed, "reasons": ["too lossy"]}, judged_by=config.gate.model_dump(mode="json"))


@pytest.fixture
def made(monkeypatch, stage) -> list[int]:
    """Group sizes that were quantised; each gives stage.small and passes."""
    sizes: list[int] = []

    def quantise(full: Artefact, group_size: int, config: ServeConfig, *_: Any) -> Artefact:
        sizes.append(group_size)
        passing(stage.small, config, passed=True)
        return load_artefact(stage.small.folder)

    monkeypatch.setattr(preparation, "_quantised_now", quantise)
    monkeypatch.setattr(preparation, "missing_kernel", lambda: None)
    return sizes


def shared_out(config: ServeConfig) -> ServeConfig:
    """The config as the gate is asked with: its error shared among two group sizes."""
    confidence = 1 - (1 - config.gate.confidence) / 2
    return config.model_copy(update={"gate": config.gate.model_copy(update={"confidence": confidence})})


def test_a_size_refused_before_by_the_same_gate_is_not_made_again(stage, made):
    passing(stage.small, shared_out(stage.config), passed=False)
    found = preparation.quantised(stage.full, stage.config, stage.said.append, NO_TASKS)
    assert made == [32]  # 64 was refused before
    assert found is not None
    assert stage.said[0] == "AWQ with groups of 64, judged before: too lossy"


def test_a_size_that_passed_before_serves_at_once(stage, made):
    passing(stage.small, shared_out(stage.config), passed=True)
    found = preparation.quantised(stage.full, stage.config, stage.said.append, NO_TASKS)
    assert made == []
    assert found is not None
    assert found.digest == stage.small.digest


def test_another_gate_judges_anew(stage, made):
    passing(stage.small, shared_out(stage.config), passed=False)
    stricter = stage.config.model_copy(
        update={"gate": stage.config.gate.model_copy(update={"max_relative_loss": 0.001})}
    )
    preparation.quantised(stage.full, stricter, stage.said.append, NO_TASKS)
    assert made == [64]


class Starts:
    """Ray Serve, of which some versions do not come up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *broken: str) -> None:
        self.running: list[str] = []
        self.stopped: list[str] = []
        self._broken = broken
        monkeypatch.setattr(application, "is_running", self.running.__contains__)
        monkeypatch.setattr(application, "start_version", self._start)
        monkeypatch.setattr(application, "stop_version", self.stopped.append)

    def _start(self, _: ServeConfig, digest: str) -> None:
        if digest in self._broken:
            raise RuntimeError("Deploying application failed:\n no memory")
        self.running.append(digest)


def test_stable_and_canary_are_started_once(stage, monkeypatch):
    stage.registry.compare_and_set(1, "canary", canary=stage.other.digest, share=0.1)
    starts = Starts(monkeypatch)
    for _ in range(2):
        application.start_registered(stage.config, stage.said.append)
    assert starts.running == [stage.full.digest, stage.other.digest]


def test_a_canary_that_does_not_start_is_taken_out_of_the_routing(stage, monkeypatch):
    stage.registry.compare_and_set(1, "canary", canary=stage.other.digest, share=0.1)
    starts = Starts(monkeypatch, stage.other.digest)
    application.start_registered(stage.config, stage.said.append)
    routing = stage.registry.routing()
    assert (routing.stable, routing.canary, routing.share) == (stage.full.digest, None, 0.0)
    assert starts.stopped == [stage.other.digest]
    reason = "the canary did not start: Deploying application failed: no memory"
    assert stage.registry.history()[-1].reason == reason
    assert stage.said[-1].endswith(reason)


def test_a_stable_version_that_does_not_start_is_an_error(stage, monkeypatch):
    Starts(monkeypatch, stage.full.digest)
    with pytest.raises(RuntimeError, match="no memory"):
        application.start_registered(stage.config, stage.said.append)
    assert stage.registry.routing().stable == stage.full.digest


def test_a_start_needs_a_registered_version(tmp_path):
    with pytest.raises(RunBroken, match="a version must be registered"):
        application.start_registered(ServeConfig(serve_dir=tmp_path / "empty"))
