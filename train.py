"""Trains a policy by group-relative policy optimisation: `python train.py CONFIG.yaml [key=value ...] [--dry-run]`.

The loop of `train` is the whole algorithm; preparation.py checks all that can be checked before Ray starts,
training_run.py holds what each word of the loop does. Giving the same run_dir again goes on from the last checkpoint.
Exit status: 0 done, 1 the run broke, 2 a mistake in what was asked, 130 or 143 interrupted; the last line on stderr
says why in one sentence.
"""

import argparse
import signal
import sys
from types import FrameType

from core.config import Config, load_config
from core.errors import RunBroken, UserError
from learners.group import LearnersLost
from preparation import describe, is_finished, prepare
from training_run import Run


def train(run: Run) -> None:
    """Turns the loop from the run's next step to its last; back to the last checkpoint where a learner was lost."""
    run.evaluate_if_due(run.start_step)
    step = run.start_step
    while step < run.num_steps:
        try:
            turn(run, step)
            step += 1
        except LearnersLost as lost:
            step = run.recover(lost)


def turn(run: Run, step: int) -> None:
    """One turn of the loop."""
    run.refill(step)  # label, ask: the prompts of at most 1 + max_staleness steps are under way
    scored = run.collect(step)  # wait for complete, scored groups
    judged = run.judge(step, scored)  # baselines and advantages
    learned = run.learn(step, judged)  # one update of the policy
    run.publish()  # new weights to the rollout workers, mid-answer
    run.commit(step, judged, learned)  # one durable record: this step happened, with these groups
    run.evaluate_if_due(step + 1)
    run.save_if_due(step + 1)


def main(words: list[str] | None = None) -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a YAML file, such as configs/laptop.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as learner.learning_rate=1e-5")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    options = parser.parse_intermixed_args(words)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(load_config(options.config, options.overrides), options.dry_run)
    except UserError as error:
        return _end(2, error)
    except RunBroken as error:
        return _end(1, error)
    except OSError as error:
        return _end(1, f"{error.filename or 'a file'} could not be used: {error.strerror or error}")
    except KeyboardInterrupt:
        return _end(130, "interrupted; the same command with the same run_dir goes on from the last checkpoint")


def _run(config: Config, dry_run: bool) -> int:
    prepared = prepare(config)
    if dry_run:
        print(describe(prepared))
        return 0
    if is_finished(prepared):
        print(f"{config.run_dir} has all its {prepared.num_steps} steps; raise num_steps, or choose another run_dir")
        return 0
    with Run(prepared) as run:
        train(run)
        run.finish()
    return 0


def _end(status: int, why: BaseException | str) -> int:
    """Says why the program ends, in one sentence; what nobody foresaw keeps its traceback instead."""
    print(f"error: {' '.join(str(why).split())}", file=sys.stderr, flush=True)
    return status


def _terminate(signum: int, frame: FrameType | None) -> None:
    print("error: terminated; the same command with the same run_dir goes on from the last checkpoint", file=sys.stderr)
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
