"""The tasks two versions are compared on: held-out prompts of the run a version comes from, and how it is rewarded."""

from dataclasses import dataclass

from core.config import Config, RewardConfig, parse_config
from core.errors import UserError
from core.trajectory import Prompt, answered
from data.dataset import load_dataset
from policy.bundled import load_tokenizer
from reward.worker import RewardWorker
from serve.artefacts.artefact import Artefact


@dataclass(frozen=True)
class Tasks:
    """Prompts with known answers, none of which the policy was trained on."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    stop: tuple[str, ...]
    reward: RewardConfig  # its first term counts
    notes: tuple[str, ...] = ()


NO_TASKS = Tasks((), 1, (), RewardConfig())  # of a version that is judged by itself


def heldout_tasks(artefact: Artefact, num_tasks: int) -> Tasks:
    """Up to num_tasks held-out prompts of the artefact's run; generated arithmetic for a model without a run.

    The generated task has more questions than the run held out: further ones that are not among its training rows
    follow. Where there are still fewer than asked for, a note says so.
    """
    config = _config_of(artefact)
    tokenizer = load_tokenizer(artefact.folder)
    dataset = load_dataset(config, tokenizer)
    prompts = list(dataset.heldout)
    if config.data.source == "arithmetic" and len(prompts) < num_tasks:
        trained = {prompt.text for prompt in dataset.train}
        # Of this many different questions, at most the trained ones are known to the policy
        wanted = config.data.arithmetic.model_copy(update={"num_prompts": len(trained) + num_tasks, "num_heldout": 1})
        wider = config.model_copy(update={"data": config.data.model_copy(update={"arithmetic": wanted})})
        more = load_dataset(wider, tokenizer)
        untrained = {prompt.text: prompt for prompt in reversed((*prompts, *more.train, *more.heldout))}
        prompts = [prompt for prompt in reversed(untrained.values()) if prompt.text not in trained]
    found = tuple(prompts[:num_tasks])
    few = (f"{num_tasks} held-out tasks asked for, {len(found)} exist",) if len(found) < num_tasks else ()
    return Tasks(found, config.rollout.max_new_tokens, config.rollout.stop, config.reward, few)


def training_texts(artefact: Artefact, num_texts: int) -> list[str]:
    """The users' words of up to num_texts different training prompts of the artefact's run."""
    dataset = load_dataset(_config_of(artefact), load_tokenizer(artefact.folder))
    return list(dict.fromkeys(prompt.text for prompt in dataset.train))[:num_texts]


def score(tasks: Tasks, texts: list[str]) -> list[float]:
    """The first reward term of each answer, in the order of the tasks."""
    if len(texts) != len(tasks.prompts):
        raise UserError(f"each of {len(tasks.prompts)} tasks must have one answer, got {len(texts)}")
    worker = RewardWorker(tasks.reward.model_copy(update={"terms": tasks.reward.terms[:1]}))
    try:
        groups = [answered(prompt, text, "gate") for prompt, text in zip(tasks.prompts, texts, strict=True)]
        return [next(iter(worker.score_terms(group).values()))[0] for group in groups]
    finally:
        worker.close()


def _config_of(artefact: Artefact) -> Config:
    return parse_config(artefact.origin.config or {"num_steps": 1}, f"config of artefact {artefact.digest[:12]}")
