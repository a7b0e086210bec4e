"""metrics.jsonl and summary.json: one whole line a step, finite numbers, and nothing lost to a kill."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core.errors import RunBroken
from core.metrics import MetricsLog, read_metrics, write_summary

pytestmark = pytest.mark.fast

CHECKOUT = Path(__file__).parents[2]


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def test_each_step_is_one_line_that_reads_back(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"step": 0, "reward_mean": 0.25, "name": "é"})
        log.append({"step": 1, "reward_mean": 0.5, "name": "two\nlines"})
    assert len(lines(tmp_path)) == 2
    assert read_metrics(tmp_path)[1] == {"step": 1, "reward_mean": 0.5, "name": "two\nlines"}


def test_no_file_means_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


def test_non_finite_numbers_become_null_and_are_named(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"step": 0, "loss": float("nan"), "kl": np.float32("inf"), "terms": {"exact": -np.inf, "b": 1.0}})
    row = read_metrics(tmp_path)[0]
    assert row == {
        "step": 0,
        "loss": None,
        "kl": None,
        "terms": {"exact": None, "b": 1.0},
        "non_finite": ["kl", "loss", "terms.exact"],
    }
    assert "NaN" not in lines(tmp_path)[0]


def test_numbers_of_numpy_are_numbers(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.append({"step": np.int64(3), "a": np.float32(0.5), "b": np.bool_(True), "c": np.arange(2), "d": (1, None)})
    assert read_metrics(tmp_path) == [{"step": 3, "a": 0.5, "b": True, "c": [0, 1], "d": [1, None]}]


@pytest.mark.parametrize("metrics", [{}, {"step": None}, {"step": 1.5}, {"step": True}, {"step": -1}])
def test_a_line_without_a_step_is_refused(tmp_path, metrics):
    with MetricsLog(tmp_path) as log, pytest.raises(ValueError, match="integer step >= 0"):
        log.append(metrics)


def test_a_value_json_has_no_word_for_is_refused_by_name(tmp_path):
    with MetricsLog(tmp_path) as log, pytest.raises(ValueError, match=r"metric a\.b must be a number.*got set"):
        log.append({"step": 0, "a": {"b": {1}}})
    assert lines(tmp_path) == []


def test_the_last_line_of_a_step_wins_and_steps_come_in_order(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step, reward in ((0, 0.1), (1, 0.2), (2, 0.3), (1, 0.9)):  # 1 and 2 were rolled back, 1 was done again
            log.append({"step": step, "reward": reward})
    assert [(row["step"], row["reward"]) for row in read_metrics(tmp_path)] == [(0, 0.1), (1, 0.9), (2, 0.3)]


@pytest.mark.parametrize("torn", ['{"step": 1, "rew', '{"step": 1}'])
def test_a_torn_last_line_is_left_out_and_the_next_line_is_not_glued_to_it(tmp_path, torn):
    # the second is whole JSON, but its newline never reached the disk: the line may yet be a part of a longer one
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + torn)
    assert read_metrics(tmp_path) == [{"step": 0}]
    with MetricsLog(tmp_path) as log:
        log.append({"step": 2})
    assert read_metrics(tmp_path) == [{"step": 0}, {"step": 2}]


@pytest.mark.parametrize("broken", ["{oops", "[]", '{"reward": 1}', ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path, broken):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{broken}\n{{"step": 1}}\n')
    with pytest.raises(RunBroken, match="line 2 must be a JSON object with a step"):
        read_metrics(tmp_path)


def test_a_full_disk_names_the_file_and_leaves_whole_lines(tmp_path):
    # 1 KiB a file: a line of about 600 bytes fits once
    program = (
        f"from pathlib import Path; from core.metrics import MetricsLog; log = MetricsLog(Path({str(tmp_path)!r}))\n"
        "for step in range(9): log.append({'step': step, 'text': 'x' * 600})"
    )
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "limited", sys.executable, "-c", program]
    ended = subprocess.run(limited, cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "metrics.jsonl could not be written: File too large" in ended.stderr.strip().splitlines()[-1]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [0]


def test_the_summary_is_replaced_whole(tmp_path):
    write_summary(tmp_path, {"accuracy": 0.5, "run_dir": tmp_path})
    path = write_summary(tmp_path, {"accuracy": np.float64(0.75), "loss": float("nan")})
    assert json.loads(path.read_text()) == {"accuracy": 0.75, "loss": None, "non_finite": ["loss"]}
    with pytest.raises(ValueError, match="metric bad"):
        write_summary(tmp_path, {"bad": object()})
    assert json.loads(path.read_text())["accuracy"] == 0.75
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
