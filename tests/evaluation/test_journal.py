"""What the journal of a run writes down and says, step by step."""

import io
from pathlib import Path

import pytest

from core.config import Config, parse_config
from core.console import Console
from core.evaluations import Evaluation, read_evaluations
from core.metrics import read_metrics
from evaluation.journal import Journal

pytestmark = pytest.mark.fast


def config(run_dir: Path, every: int = 5) -> Config:
    return parse_config({"run_dir": str(run_dir), "num_steps": 20, "watch": {"every": every}}, "here")


def told(run_dir: Path, steps: range, every: int = 5, **changed: float) -> list[str]:
    """The lines of the terminal of a run of these steps, which are well but for `changed`."""
    stream = io.StringIO()
    with Console(20, steps.start, stream) as console:
        journal = Journal(config(run_dir, every), console, steps.start)
        try:
            for step in steps:
                journal.step({"step": step, "reward_mean": 0.5, "reward_std": 0.4, "seconds": 4.0} | changed)
        finally:
            journal.close()
    return stream.getvalue().splitlines()


def troubles(lines: list[str]) -> list[tuple[int, str]]:
    """(place, trouble) of the lines that tell one; memory may truly be short where the tests run."""
    found = [(place, line) for place, line in enumerate(lines) if line.startswith(("critical", "warning", "note"))]
    return [(place, line.split(": ")[1]) for place, line in found if "memory_short" not in line]


def test_a_trouble_is_said_once_with_its_cure_after_the_step_that_showed_it(tmp_path):
    lines = told(tmp_path, range(20), truncated_share=0.6)
    assert troubles(lines) == [(10, "answers_truncated")]  # ten step lines, then this one
    assert "set rollout.max_new_tokens=48 (now 24) or learner.mask_truncated=true (now false)" in lines[10]


def test_a_run_that_is_well_is_told_nothing_and_a_run_that_does_not_watch_neither(tmp_path):
    assert troubles(told(tmp_path / "well", range(20))) == []
    assert troubles(told(tmp_path / "blind", range(20), every=0, truncated_share=0.6)) == []


def test_a_resumed_run_is_looked_at_with_what_it_did_before_and_not_with_what_was_rolled_back(tmp_path):
    told(tmp_path, range(9), truncated_share=0.6)
    assert troubles(told(tmp_path, range(8, 20), truncated_share=0.6)) == [(2, "answers_truncated")]
    assert len(read_metrics(tmp_path)) == 20


def test_a_step_gains_memory_and_what_is_measured_over_steps(tmp_path):
    told(tmp_path, range(12))
    steps = read_metrics(tmp_path)
    assert all(0 < step["memory_used_share"] <= 1 and step["memory_driver_bytes"] > 1 << 20 for step in steps)
    assert [("reward_volatility" in step) for step in steps] == [False] * 9 + [True] * 3


def test_an_evaluation_is_written_and_looked_at_at_once(tmp_path):
    stream = io.StringIO()
    with Console(20, 0, stream) as console:
        journal = Journal(config(tmp_path), console, 0)
        for step, accuracy in ((0, 0.3), (8, 0.9), (16, 0.4), (20, 0.4)):
            journal.evaluation(Evaluation(step, accuracy, 64, round(64 * accuracy), []))
        journal.close()
    # 0.9 to 0.4 is 6.9 errors; one evaluation counts half of it, which is above 2.
    assert troubles(stream.getvalue().splitlines()) == [(3, "heldout_declining")]
    assert [one.step for one in read_evaluations(tmp_path)] == [0, 8, 16, 20]


def test_a_check_that_fails_is_said_once_and_ends_nothing(tmp_path, monkeypatch):
    def fail(_: object) -> list:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("core.watch.watcher.examine", fail)
    lines = told(tmp_path, range(20))
    assert [line for line in lines if "the checks failed" in line] == [lines[5]]
    assert len(read_metrics(tmp_path)) == 20
