"""What is wrong with a training run, and which config line to change: `python -m cluster.doctor RUN_DIR`.

Reads a run folder, of a running or an ended run. Exit status: 0 nothing found, 1 something found, 2 no run to judge
(no such folder, a broken file); then the last line on stderr says why in one sentence.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.checkpoint import list_checkpoints
from core.config import Config, load_config
from core.errors import RunBroken, UserError
from core.evaluations import EVALUATIONS, Evaluation, parsed_evaluation, read_evaluations
from core.metrics import SUMMARY, read_metrics
from core.watch.checks import CHECKS, examine
from core.watch.finding import Finding
from core.watch.history import WINDOW, History

CONFIG = "config.yaml"


def read_history(run_dir: Path) -> History:
    """The History of a run folder. UserError or RunBroken, in one sentence, where there is no run or a file is broken.

    A last line that is not whole is being written, or was torn by a kill: it is left out.
    """
    if not run_dir.is_dir():
        raise UserError(f"RUN_DIR must be a run's folder, got {run_dir}, which is no folder")
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"RUN_DIR must hold {CONFIG}, got {run_dir} without; name the run_dir that train.py was given")
    config: Config = load_config(run_dir / CONFIG)
    steps = read_metrics(run_dir)
    checkpoints = tuple(step for step, _ in list_checkpoints(run_dir))
    history = History(config, steps, _evaluations(run_dir), checkpoints)
    peaks = _summary(run_dir / SUMMARY).get("peak_memory_bytes") or {}
    if steps and isinstance(peaks, dict):  # of a release that did not write them each step
        known = {f"memory_{str(kind).replace(' ', '_')}_bytes": size for kind, size in peaks.items()}
        history = replace(history, steps=[*steps[:-1], known | steps[-1]])
    return history


def describe(run_dir: Path, history: History, findings: list[Finding]) -> str:
    """The doctor's words."""
    num_steps = len(history.steps)
    lines = [f"{run_dir}: {_counted(num_steps, 'step')}, {_counted(len(history.evaluations), 'evaluation')}"]
    for finding in findings:
        lines.append(f"{finding.severity}: {finding.check}: {finding.seen}")
        lines += [f"  {'or ' if place else ''}{cure.text()}" for place, cure in enumerate(finding.cures)]
        lines += [f"  {finding.advice}"] if finding.advice else []
    if num_steps < 2 * WINDOW:
        lines.append(f"note: trends need {2 * WINDOW} steps; {_counted(num_steps, 'step')} say little")
    if not findings:
        lines.append(f"nothing found ({len(CHECKS)} checks)")
    return "\n".join(lines)


def _evaluations(run_dir: Path) -> list[Evaluation]:
    """A torn line begins like a whole one; anything else is no evaluation, and not to be passed over in silence."""
    file = run_dir / EVALUATIONS
    for number, line in enumerate(file.read_bytes().split(b"\n") if file.is_file() else [], start=1):
        try:
            if line:
                parsed_evaluation(line)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            torn = isinstance(error, json.JSONDecodeError) and line.startswith(b'{"step"')
            if not torn:
                raise UserError(f"{file} line {number} must be an evaluation, got {line[:80]!r}") from None
    return read_evaluations(run_dir)


def _summary(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        summary = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict):
        raise UserError(f"{file} must be a JSON object, got something else; the run writes it anew when it ends")
    return summary


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def main(words: list[str] | None = None) -> int:
    """The exit status of one call of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    run_dir = parser.parse_args(words).run_dir
    try:
        history = read_history(run_dir)
    except (UserError, RunBroken) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or run_dir} could not be read: {error.strerror or error}", file=sys.stderr)
        return 2
    findings = examine(history)
    print(describe(run_dir, history, findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
