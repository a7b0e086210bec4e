"""Loggers: TensorBoard's files read back for real; wandb and mlflow through stand-ins imported by their real names.

The stand-ins prove what is asked of the packages, not that the packages take it: neither is among the requirements.
"""

import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from core.config import Config, parse_config
from core.errors import UserError
from evaluation import loggers
from evaluation.loggers import Background, check_loggers, has_wandb_key, open_loggers, run_id

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]


def config(run_dir: Path, *names: str) -> Config:
    return parse_config({"run_dir": str(run_dir), "num_steps": 4, "logging": {"loggers": list(names)}}, "here")


def log_two_steps(run_dir: Path, name: str, start_step: int = 0) -> list[str]:
    """What was said while a logger took a step, an evaluation and a step."""
    said: list[str] = []
    (logger,) = open_loggers(config(run_dir, name), start_step, said.append)
    logger.log(start_step + 1, {"reward_mean": 0.25, "entropy": 2.0})
    logger.log(start_step + 1, {"heldout_accuracy": 0.5})
    logger.log(start_step + 2, {"reward_mean": 0.75})
    logger.close()
    return said


def events(file: Path) -> list[Event]:
    """The records of an event file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    data, found = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        found.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def test_tensorboard_gets_each_number_under_its_step_and_hides_what_was_rolled_back(tmp_path):
    assert log_two_steps(tmp_path, "tensorboard") == []
    (first,) = (tmp_path / "tensorboard").iterdir()
    values = [
        (event.step, value.tag, value.simple_value)
        for event in events(first)
        for value in event.summary.value
        if value.HasField("simple_value")
    ]
    assert values == [
        (1, "reward_mean", 0.25),
        (1, "entropy", 2.0),
        (1, "heldout_accuracy", 0.5),
        (2, "reward_mean", 0.75),
    ]
    time.sleep(1.1)  # a file is named by its second
    assert log_two_steps(tmp_path, "tensorboard", start_step=1) == []
    (second,) = set((tmp_path / "tensorboard").iterdir()) - {first}
    starts = [event.step for event in events(second) if event.session_log.status == event.session_log.START]
    assert starts == [2]


class FakeWandb(ModuleType):
    """Keeps what it is asked."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.num_finished = 0
        self.Settings = lambda **words: words

    def init(self, **words: Any) -> "FakeWandb":
        self.asked = words
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def wandb(monkeypatch, tmp_path) -> FakeWandb:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_is_offline_without_a_key_and_goes_on_as_the_same_run(tmp_path, wandb):
    assert log_two_steps(tmp_path / "run", "wandb") == []
    assert [step for step, _ in wandb.logged] == [1, 1, 2]
    assert (wandb.asked["mode"], wandb.asked["project"], wandb.num_finished) == ("offline", "grpo", 1)
    assert wandb.asked["config"]["num_steps"] == 4
    first = wandb.asked["id"]
    assert log_two_steps(tmp_path / "run", "wandb", start_step=2) == []
    assert (wandb.asked["id"], wandb.asked["resume"]) == (first, "allow")
    assert run_id(config(tmp_path / "other")) != first


def test_wandb_is_online_with_a_key_and_as_wandb_mode_says(tmp_path, wandb, monkeypatch):
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.intern:8080/")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    log_two_steps(tmp_path / "run", "wandb")
    assert wandb.asked["mode"] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log_two_steps(tmp_path / "run", "wandb")
    assert wandb.asked["mode"] == "disabled"


class FakeMlflow(ModuleType):
    """A store of one experiment; refuses what the real one refuses."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.entities = SimpleNamespace(Param=lambda *words: words, Metric=lambda *words: words)
        self.runs: dict[str, SimpleNamespace] = {}
        self.uri, self.artifact_location, self.experiment = "", None, None

    def MlflowClient(self, tracking_uri: str) -> "FakeMlflow":
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiment

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        self.artifact_location = artifact_location
        self.experiment = SimpleNamespace(name=name, experiment_id="1")
        return "1"

    def search_runs(self, experiments: list[str], text: str, max_results: int) -> list[Any]:
        return [run for name, run in self.runs.items() if text == f"tags.run_dir_id = '{name}'"]

    def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
        run = SimpleNamespace(
            info=SimpleNamespace(run_id=tags["run_dir_id"]), name=run_name, params={}, metrics=[], status="RUNNING"
        )
        self.runs[tags["run_dir_id"]] = run
        return run

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id].status = status

    def log_batch(self, run_id: str, metrics: tuple = (), params: tuple = ()) -> None:
        assert len(params) <= 100
        assert not set(self.runs[run_id].params) & {key for key, _ in params}
        self.runs[run_id].params |= dict(params)
        self.runs[run_id].metrics += [(step, name, value) for name, value, _, step in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id].status = "FINISHED"


def test_mlflow_keeps_config_and_metrics_in_the_run_folder_and_goes_on_as_the_same_run(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    module = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    assert log_two_steps(tmp_path, "mlflow") == []
    assert log_two_steps(tmp_path, "mlflow", start_step=2) == []
    (run,) = module.runs.values()
    assert (run.name, run.status, run.params["rollout.temperature"]) == (tmp_path.name, "FINISHED", "1.0")
    assert [(step, value) for step, name, value in run.metrics if name == "reward_mean"] == [
        (1, 0.25),
        (2, 0.75),
        (3, 0.25),
        (4, 0.75),
    ]
    assert (module.uri, module.artifact_location) == (
        f"sqlite:///{tmp_path}/mlflow.db",
        f"{tmp_path}/mlflow_artifacts",
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.intern:5000")
    log_two_steps(tmp_path / "another", "mlflow")
    assert module.uri == "http://mlflow.intern:5000"


@pytest.mark.parametrize("fails_in", ["init", "log", "finish"])
def test_a_logger_that_fails_is_said_once_and_left_out(tmp_path, wandb, monkeypatch, fails_in):
    def fail(*_: Any, **__: Any) -> None:
        raise SystemExit("no\nserver")

    monkeypatch.setattr(wandb, fails_in, fail)
    (said,) = log_two_steps(tmp_path, "wandb")
    assert said == (
        "warning: logger wandb failed: SystemExit: no server; the run goes on without it, metrics.jsonl has everything"
    )


def test_a_logger_that_hangs_holds_nobody_up(tmp_path, wandb, monkeypatch):
    free = threading.Event()
    monkeypatch.setattr(wandb, "log", lambda *_, **__: free.wait(30))
    monkeypatch.setattr(loggers, "CLOSE_S", 0.2)
    monkeypatch.setattr(loggers, "MAX_WAITING", 3)
    began, said = time.monotonic(), []
    slow = Background("wandb", lambda: loggers.WandB(config(tmp_path, "wandb"), 0), said.append)
    slow.log(1, {})
    slow.close()
    assert time.monotonic() - began < 5
    assert [line.split(";")[0] for line in said] == ["warning: logger wandb was not done 0 s after the end"]
    full = Background("wandb", lambda: loggers.WandB(config(tmp_path, "wandb"), 0), said.append)
    for step in range(10):
        full.log(step, {})
    assert len(said) == 2
    assert "has not taken the last 3 steps" in said[1]
    full.close()
    assert time.monotonic() - began < 5
    free.set()


def test_a_package_that_is_missing_or_broken_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with pytest.raises(
        UserError, match=r"the package wandb must be importable for logging\.loggers=wandb.*pip install"
    ):
        check_loggers(config(tmp_path, "tensorboard", "wandb"))
    (tmp_path / "mlflow.py").write_text("raise RuntimeError('of another\\nrelease')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="got: of another release; pip install mlflow, or leave mlflow out"):
        check_loggers(config(tmp_path, "mlflow"))
    check_loggers(config(tmp_path, "tensorboard"))


def test_an_unknown_logger_is_one_sentence_with_the_known_ones(tmp_path):
    told = r"logging\.loggers\.0 must be 'tensorboard', 'wandb' or 'mlflow', got 'comet'"
    with pytest.raises(UserError, match=told):
        config(tmp_path, "comet")


def test_train_ends_with_2_before_ray_starts(tmp_path):
    (tmp_path / "wandb.py").write_text("raise ImportError('no such thing')")
    words = ["configs/laptop.yaml", f"run_dir={tmp_path}/run", "logging.loggers=[wandb]"]
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import train, ray; "
        f"print(train.main({words!r}), ray.is_initialized())"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "2 False\n", ended.stderr
    assert "the package wandb must be importable" in ended.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()
