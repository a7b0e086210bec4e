"""What is known and checked of a run before Ray starts: machine, model, data, rewards, plan."""

from dataclasses import dataclass
from pathlib import Path

from core.checkpoint import list_checkpoints
from core.config import Config, dump_config
from core.errors import UserError
from core.machine import Machine, read_machine
from core.plan import Plan, check_context, make_plan
from data.dataset import Dataset, load_dataset
from data.schedule import num_steps_of
from evaluation.loggers import check_loggers
from grouping.embeddings import find_encoder
from policy.bundled import load_tokenizer, resolve_model
from reward.worker import RewardWorker


@dataclass(frozen=True)
class Prepared:
    """Everything that is known and checked before Ray starts."""

    config: Config
    machine: Machine
    model: Path
    dataset: Dataset
    num_steps: int
    plan: Plan


def prepare(config: Config) -> Prepared:
    """The checked parts of a run; UserError for anything that cannot work on this machine."""
    machine = read_machine(config.run_dir)
    model = resolve_model(config.policy.model)
    check_context(config, model)
    dataset = load_dataset(config, load_tokenizer(model))
    check_rewards(config, dataset)
    check_encoder(config)
    check_loggers(config)
    num_steps = num_steps_of(config, len(dataset.train))
    plan = make_plan(config, machine, model, len(dataset.train), num_steps, dataset.notes)
    if config.cluster.address is None:
        plan.check(machine)
    return Prepared(config, machine, model, dataset, num_steps, plan)


def check_rewards(config: Config, dataset: Dataset) -> None:
    """Loads every reward here first: a bad pattern, file or reference answer is one sentence before any model loads."""
    worker = RewardWorker(config.reward)
    try:
        worker.check((*dataset.train, *dataset.heldout))
    finally:
        worker.close()


def check_encoder(config: Config) -> None:
    """Raises UserError where the sentence encoder's folder is not there."""
    try:
        find_encoder(config.grouping.encoder)
    except ValueError as error:
        raise UserError(str(error)) from None


def is_finished(prepared: Prepared) -> bool:
    """Whether the run folder holds the checkpoint of the last step already."""
    return any(step >= prepared.num_steps for step, _ in list_checkpoints(prepared.config.run_dir))


def describe(prepared: Prepared) -> str:
    """The resolved plan and configuration, for --dry-run."""
    return f"{prepared.plan.text()}\n\n{dump_config(prepared.config)}"
