"""Held-out accuracy: greedy answers to prompts the policy was never trained on, judged by the first reward term."""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.flow import Flow
from core.config import Config
from core.trajectory import Prompt, answered

EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class Evaluation:
    """One held-out evaluation."""

    step: int
    accuracy: float
    num_prompts: int
    correct: int
    samples: list[dict[str, Any]]  # prompt, answer, text, correct


def evaluate(step: int, flow: Flow, prompts: tuple[Prompt, ...], config: Config) -> Evaluation:
    """The Evaluation of the weights that the rollout workers hold now.

    An answer counts as correct where the first reward term gives it at least 0.5.
    """
    asked = list(prompts[: config.evaluation.num_prompts])
    texts = flow.answer_greedily(asked)
    marks = flow.score_first_term(
        [answered(prompt, text, "heldout") for prompt, text in zip(asked, texts, strict=True)]
    )
    correct = [mark >= 0.5 for mark in marks]
    samples = [
        {"prompt": prompt.text, "answer": prompt.answer, "text": text, "correct": right}
        for prompt, text, right in zip(asked, texts, correct, strict=True)
    ][: config.evaluation.num_samples_shown]
    return Evaluation(step, sum(correct) / len(correct), len(correct), sum(correct), samples)


def append_evaluation(run_dir: Path, evaluation: Evaluation) -> None:
    """Adds a line to the run folder's evaluations.jsonl; one that a kill tore is closed off first."""
    with (run_dir / EVALUATIONS).open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")
        stream.write(json.dumps(asdict(evaluation)).encode() + b"\n")


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """The run's evaluations by step; of two of one step the later counts, and torn lines do not."""
    file = run_dir / EVALUATIONS
    found: dict[int, Evaluation] = {}
    for line in file.read_bytes().split(b"\n") if file.is_file() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(line)
            found[entry["step"]] = Evaluation(**entry)
    return [found[step] for step in sorted(found)]
