"""Held-out accuracy of a run or a model: `python -m evaluation RUN_OR_MODEL [--config CONFIG.yaml] [key=value ...]`.

For a run folder, its own config.yaml and newest whole checkpoint are used. For a model (smollm2-135m, or a folder in
Hugging Face format) --config says which prompts and rewards to use. Exit status as in train.py.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from actors.crew import Weights, reward_pool, rollout_pool
from actors.flow import Flow
from cluster.session import end_session, start_session
from core.checkpoint import newest_checkpoint
from core.config import Config, load_config
from core.console import Console
from core.errors import RunBroken, UserError
from core.evaluations import Evaluation
from core.machine import read_machine
from data.dataset import load_dataset
from evaluation.heldout import evaluate
from policy.bundled import load_tokenizer, resolve_model


def evaluate_target(target: str, config: Config, weights: Path | None, step: int) -> Evaluation:
    """The Evaluation of a model folder, or of a run's checkpoint laid over the model it started from."""
    machine = read_machine(config.run_dir)
    model = resolve_model(config.policy.model)
    dataset = load_dataset(config, load_tokenizer(model))
    try:
        with Console(1) as console:
            console.say(
                f"evaluating {target} on {min(len(dataset.heldout), config.evaluation.num_prompts)} held-out prompts"
            )
            start_session(config.cluster, machine)
            rewards = reward_pool(config)
            rollouts = rollout_pool(config, model, machine, Weights(1 if weights else 0, weights))
            rewards.wait_ready(config.deadlines.start_s, console.phase)
            rollouts.wait_ready(config.deadlines.start_s, console.phase)
            return evaluate(step, Flow(rollouts, rewards, config.deadlines, console.phase), dataset.heldout, config)
    finally:
        end_session()


def main() -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m evaluation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", help="a run folder, a model folder, or smollm2-135m")
    parser.add_argument("--config", default="configs/laptop.yaml", help="prompts and rewards, where target is a model")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    try:
        run = Path(options.target)
        if (run / "config.yaml").is_file():
            config: Config = load_config(run / "config.yaml", options.overrides)
            found = newest_checkpoint(run)
            if found is None:
                raise UserError(
                    f"{run} must hold a checkpoint, got none; let the run reach checkpoint.every steps first"
                )
            evaluation = evaluate_target(options.target, config, found.path / "policy", found.step)
        else:
            config = load_config(options.config, [*options.overrides, f"policy.model={options.target}"])
            evaluation = evaluate_target(options.target, config, None, 0)
    except (UserError, RunBroken) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    share, num = evaluation.accuracy, evaluation.num_prompts
    spread = math.sqrt(share * (1 - share) / num)
    print(json.dumps(asdict(evaluation), ensure_ascii=False, indent=2))
    print(f"held-out accuracy: {share:.3f} +- {spread:.3f} ({evaluation.correct} of {num}, one standard error)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
