"""TensorBoard, wandb and mlflow: a run's numbers for those who keep them there, beside metrics.jsonl.

Each needs its package, which is looked for before anything starts. Afterwards a logger is a courtesy: it works in a
thread of its own, and one that fails or falls behind is named once and left out. It never holds up the run or ends it.
"""

import importlib
import netrc
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Protocol

from core.config import Config, dump_config
from core.errors import UserError

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}  # logger -> module
MAX_WAITING = 1000  # steps not yet taken; more, and a logger has fallen behind for good
MAX_PARAMS = 100  # that mlflow takes at once
MAX_PARAM_CHARACTERS = 500  # that every release of it takes
CLOSE_S = 20.0  # for the rest, when the run ends

Say = Callable[[str], None]


class Logger(Protocol):
    """One place that keeps the numbers of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps finite numbers; `step` counts finished steps and never falls."""

    def close(self) -> None:
        """Everything logged is kept."""


class TensorBoard:
    """Event files in RUN_DIR/tensorboard: `tensorboard --logdir RUN_DIR`."""

    def __init__(self, config: Config, start_step: int) -> None:
        module = importlib.import_module(PACKAGES["tensorboard"])
        folder = str(config.run_dir / "tensorboard")
        # Steps after a resume's checkpoint were rolled back: TensorBoard hides what an earlier file says of them.
        self._writer = module.SummaryWriter(folder, purge_step=start_step + 1 if start_step else None)
        if not start_step:
            self._writer.add_text("config", f"```yaml\n{dump_config(config)}```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases: in RUN_DIR/wandb, and online where there is a key or WANDB_MODE says so."""

    def __init__(self, config: Config, start_step: int) -> None:
        module = importlib.import_module(PACKAGES["wandb"])
        self._run = module.init(
            project=config.logging.project,
            name=config.run_dir.resolve().name,
            id=run_id(config),
            resume="allow",  # the same run_dir goes on as the same run
            dir=str(config.run_dir),
            config=config.model_dump(mode="json"),
            mode=os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline"),
            settings=module.Settings(console="off", silent=True),  # the terminal belongs to the run's own table
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An mlflow run: at MLFLOW_TRACKING_URI where that is set, else in RUN_DIR/mlflow.db."""

    def __init__(self, config: Config, start_step: int) -> None:
        self._mlflow = importlib.import_module(PACKAGES["mlflow"])
        folder, project, own_id = config.run_dir.resolve(), config.logging.project, run_id(config)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        found = self._client.get_experiment_by_name(project)
        # Left to itself a local store puts artifacts into the working directory.
        where = {} if uri else {"artifact_location": str(folder / "mlflow_artifacts")}
        experiment = found.experiment_id if found else self._client.create_experiment(project, **where)
        same = self._client.search_runs([experiment], f"tags.run_dir_id = '{own_id}'", max_results=1)
        if same:  # the same run_dir goes on as the same run, whose parameters mlflow lets nobody change
            self._id = same[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
            return
        run = self._client.create_run(experiment, run_name=folder.name, tags={"run_dir_id": own_id})
        self._id = run.info.run_id
        texts = flat(config.model_dump(mode="json"))
        settings = [self._mlflow.entities.Param(key, text) for key, text in texts.items()]
        for start in range(0, len(settings), MAX_PARAMS):
            self._client.log_batch(self._id, params=settings[start : start + MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


KINDS: dict[str, Callable[[Config, int], Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


def check_loggers(config: Config) -> None:
    """UserError in one sentence where a logger's package is not there or does not import."""
    for name in config.logging.loggers:
        try:
            importlib.import_module(PACKAGES[name])
        except Exception as error:  # a broken package may raise anything on import
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"the package {PACKAGES[name]} must be importable for logging.loggers={name}, got: {why}; pip install "
                f"{PACKAGES[name]}, or leave {name} out"
            ) from None


def has_wandb_key() -> bool:
    """Whether wandb would find a key: in WANDB_API_KEY, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = (os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").split("//")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(config: Config) -> str:
    """A run folder's own id: the same after a resume, another for another folder."""
    return sha256(os.fsencode(config.run_dir.resolve())).hexdigest()[:16]


def flat(tree: Mapping[str, object], above: str = "") -> dict[str, str]:
    """section.key -> its value as text, of a nested config."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        inner = flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": str(value)}
        found |= {name: text[:MAX_PARAM_CHARACTERS] for name, text in inner.items()}
    return found


class Background:
    """A logger in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], Logger], say: Say) -> None:
        self._name, self._make, self._say = name, make, say
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MAX_WAITING)
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Returns at once."""
        if self._gone.is_set():
            return
        try:
            self._waiting.put_nowait((step, dict(values)))
        except queue.Full:
            self._give_up(f"has not taken the last {MAX_WAITING} steps")

    def close(self) -> None:
        """Waits for what was logged to be kept, CLOSE_S at most."""
        if self._gone.is_set():
            return
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._give_up(f"was not done {CLOSE_S:.0f} s after the end")

    def _run(self) -> None:
        try:
            logger = self._make()
            while (item := self._waiting.get()) is not None and not self._gone.is_set():
                logger.log(*item)
            logger.close()
        except BaseException as error:  # whatever a package raises, SystemExit too, stays in this thread
            self._give_up(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _give_up(self, why: str) -> None:
        if not self._gone.is_set():
            self._gone.set()
            self._say(f"warning: logger {self._name} {why}; the run goes on without it, metrics.jsonl has everything")


def open_loggers(config: Config, start_step: int, say: Say) -> list[Background]:
    """The configured loggers, each already at work."""
    return [
        Background(name, lambda kind=KINDS[name]: kind(config, start_step), say)  # type: ignore[misc]
        for name in dict.fromkeys(config.logging.loggers)
    ]
