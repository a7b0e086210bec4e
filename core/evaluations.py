"""evaluations.jsonl: the held-out evaluations of a run, a line each."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """One held-out evaluation."""

    step: int
    accuracy: float
    num_prompts: int
    correct: int
    samples: list[dict[str, Any]]  # prompt, answer, text, correct


def append_evaluation(run_dir: Path, evaluation: Evaluation) -> None:
    """Adds a line to the run folder's evaluations.jsonl; one that a kill tore is closed off first."""
    with (run_dir / EVALUATIONS).open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(json.dumps(asdict(evaluation)).encode() + b"\n")


def parsed_evaluation(line: bytes) -> Evaluation:
    """The Evaluation of a line. ValueError, TypeError, KeyError or RecursionError for one that holds none."""
    found = Evaluation(**json.loads(line))
    whole = all(isinstance(value, int) for value in (found.step, found.num_prompts)) and found.num_prompts >= 1
    if not whole or not isinstance(found.accuracy, int | float) or not 0 <= found.accuracy <= 1:
        raise ValueError(f"an evaluation must hold a step, an accuracy from 0 to 1 and prompts, got {line[:80]!r}")
    return found


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """The run's evaluations by step; of two of one step the later counts, and torn lines do not."""
    file = run_dir / EVALUATIONS
    found: dict[int, Evaluation] = {}
    for line in file.read_bytes().split(b"\n") if file.is_file() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            evaluation = parsed_evaluation(line)
            found[evaluation.step] = evaluation
    return [found[step] for step in sorted(found)]
