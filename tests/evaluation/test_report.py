"""The report of small made-up run folders: its numbers, what it draws, and that hostile text stays text."""

import json
import math
import random
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest

from evaluation.report import cards_of, main, write_report
from evaluation.report_map import clouds_of
from evaluation.report_plots import plots_of
from evaluation.report_run import read_run, thinned, wilson_interval

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> & \"q\" 'q' \ud800 \u2028 \x00"
CONFIG = "seed: 0\nnum_steps: 40\npolicy:\n  model: smollm2-135m\ngrouping:\n  baseline: semantic # <b>bold</b>\n"


def write_run(run_dir: Path, num_steps: int = 40, evaluate_every: int = 10) -> Path:
    """A run folder as training leaves it, with numbers of about the size of real ones."""
    run_dir.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    write_lines(run_dir / "metrics.jsonl", [step_line(step, num_steps, draw) for step in range(num_steps)])
    evaluations = [evaluation_line(step, num_steps) for step in range(0, num_steps + 1, evaluate_every)]
    write_lines(run_dir / "evaluations.jsonl", evaluations)
    clusters = {"x": [], "y": [], "label": [], "text": [], "cluster_version": 2, "notes": []}
    for _ in range(300):
        label = draw.randrange(8)
        clusters["x"].append(math.cos(label) + draw.gauss(0, 0.12))
        clusters["y"].append(math.sin(2 * label) + draw.gauss(0, 0.12))
        clusters["label"].append(label)
        clusters["text"].append(f"What is {draw.randrange(20)} + {draw.randrange(20)}? {'Please answer. ' * label}")
    (run_dir / "clusters.json").write_text(json.dumps(clusters))
    (run_dir / "config.yaml").write_text(CONFIG)
    groups = {"groups_trained": num_steps * 16, "samples_trained": num_steps * 128, "groups_dropped": 3}
    speed = {"seconds_per_step_median": 7.25, "rollout_tokens_per_s": 1234.5, "recomputes": 1, "num_clusters": 8}
    peaks = {"driver": 2**29, "rollout-0": 2**31, "learner-0": 3 * 2**30}
    summary = {"steps": num_steps, **groups, **speed, "peak_memory_bytes": peaks}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def step_line(step: int, num_steps: int, draw: random.Random) -> dict:
    progress = step / max(1, num_steps)
    seconds = {"seconds": 7.5, "reward_s": 0.1, "grouping_s": 0.2, "learner_s": 3.2, "weights_s": 0.6}
    clusters = {
        "num_clusters": 8,
        "cluster_version": 1 + (step >= 20),
        "recomputes": int(step >= 20),
        "tfidf_lift": 0.4,
    }
    counts = {"step": step, "version": step, "groups_trained": 16, "groups_dropped": 0, "weight_update_pause_s": 0.35}
    return {
        **counts,
        **seconds,
        **clusters,
        "reward_mean": 0.2 + 0.6 * progress + draw.gauss(0, 0.04),
        "heldout_accuracy": 0.2 + 0.6 * progress if step % 10 == 0 else None,
        "entropy": 1.4 - progress + draw.gauss(0, 0.03),
        "staleness_mean": 0.4 + draw.random() / 5,
        "staleness_max": draw.choice([1, 1, 2]),
        "mean_abs_logprob_difference": 0.002 + draw.random() / 1000,
        "importance_truncated_share": draw.random() / 500,
        "answer_tokens_mean": 12 - 4 * progress + draw.gauss(0, 0.3),
        "truncated_share": 0.3 * (1 - progress),
        "distinct_share": 0.9 - 0.4 * progress,
        "rollout_tokens_per_s": 1200 + draw.gauss(0, 40),
        "learner_tokens_per_s": 700 + draw.gauss(0, 20),
        "rollout_s": 3.0 + draw.random() / 3,
        "grad_norm": 0.5 + draw.random() / 2,
        "zero_variance_share": 0.2 + 0.3 * progress,
        "tau2": 0.02 + progress / 100,
        "icc": 0.3 - progress / 10,
    }


def evaluation_line(step: int, num_steps: int) -> dict:
    correct = round(64 * (0.2 + 0.6 * step / max(1, num_steps)))
    samples = [
        {"prompt": f"What is {k} + {k}?", "answer": str(2 * k), "text": f"It is {2 * k}.\nSure.", "correct": k < 4}
        for k in range(6)
    ]
    samples.append({"prompt": HOSTILE, "answer": HOSTILE, "text": f"{HOSTILE} after {step}", "correct": False})
    return {"step": step, "accuracy": correct / 64, "num_prompts": 64, "correct": correct, "samples": samples}


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """The elements and the visible text of a page, as a browser without scripts has them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text, self.scripts, self._inside = "", [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def report(run_dir: Path) -> Page:
    return Page(write_report(run_dir))


def cards(run_dir: Path) -> dict[str, tuple[str, str]]:
    return {what: (value, remark) for what, value, remark in cards_of(read_run(run_dir))}


def test_the_page_shows_the_key_numbers_without_javascript(tmp_path):
    page = report(write_run(tmp_path / "first run"))
    for words in ("first run", "smollm2-135m", "0.203 → 0.797", "7.2", "13 of 64", "groups, 3 dropped", "5.5 GiB"):
        assert words in page.text
    assert "no summary.json" not in page.text


def test_cards_say_the_numbers_of_the_summary(tmp_path):
    found = cards(write_run(tmp_path))
    assert found["Held-out accuracy"] == ("0.203 → 0.797", "+0.594 absolute")  # 13/64 and 51/64: 38/64 = 0.594
    assert found["Steps"] == ("40", "of 40 planned")
    assert found["Seconds a step"] == ("7.2", "5 min 00 s in all")  # the summary's 7.25; 40 steps of 7.5 s
    assert found["Samples trained"] == ("5,120", "640 groups, 3 dropped")
    assert found["Peak memory"] == ("5.5 GiB", "learner-0: 3.0 GiB")  # 0.5 + 2 + 3
    assert found["Clusters"] == ("8", "1 refit")


def test_a_killed_run_is_reported_from_its_steps(tmp_path):
    write_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 40, "reward_m')
    with (tmp_path / "evaluations.jsonl").open("a") as stream:
        stream.write('{"step": 40, "accuracy": 0.')
    page = report(tmp_path)
    assert "This run has no summary.json" in page.text
    assert "1 torn or unreadable line(s) of evaluations.jsonl" in page.text
    found = cards(tmp_path)
    assert found["Seconds a step"][0] == "7.5"
    assert found["Groups trained"] == ("640", "")
    assert found["Held-out accuracy"][0] == "0.203 → 0.797"
    assert "Peak memory" not in found


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_very_short_run_has_a_report(tmp_path, num_steps):
    write_run(tmp_path, num_steps=num_steps, evaluate_every=1)
    page = report(tmp_path)
    assert (f"Steps ({num_steps})" in page.text) == (num_steps > 0)
    assert ("Not recorded in this run" in page.text) == (num_steps == 0)


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.jsonl", "summary.json", "evaluations.jsonl"])
def test_one_file_is_enough(tmp_path, kept):
    for path in write_run(tmp_path).iterdir():
        if path.name != kept:
            path.unlink()
    assert "Plots" in report(tmp_path).text


def test_files_of_the_wrong_shape_are_left_out_with_a_sentence(tmp_path):
    write_run(tmp_path)
    (tmp_path / "summary.json").write_text("[1]")
    (tmp_path / "clusters.json").write_text('{"x": 3, "y": [null], "label": ["a"], "text": 5}')
    (tmp_path / "config.yaml").write_text("a: [")
    rows = [{"step": 1, "accuracy": "high", "samples": 3}, {"step": "x"}, 7, {"step": 2, "samples": [4, {}]}]
    write_lines(tmp_path / "evaluations.jsonl", rows)
    page = report(tmp_path)
    assert "summary.json holds no whole JSON object" in page.text
    assert "config.yaml could not be read as YAML" in page.text
    assert "2 torn or unreadable line(s)" in page.text
    assert "Cluster map" in page.text.split("Not recorded in this run")[1]


def test_missing_keys_and_values_that_are_no_numbers_are_left_out(tmp_path):
    rows = [{"step": 0}, {"step": 1, "reward_mean": None, "entropy": "x"}, {"step": 2, "reward_mean": float("nan")}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    plots, missing = plots_of(read_run(tmp_path))
    assert plots == []
    assert len(missing) == 11
    assert "Steps (3)" in report(tmp_path).text


def test_the_last_line_of_a_step_counts(tmp_path):
    rows = [
        {"step": step, "reward_mean": reward} for step, reward in [(0, 0.1), (1, 0.2), (2, 0.9), (1, 0.3), (2, 0.4)]
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    samples = [{"prompt": "p", "answer": "a", "text": "t"}]
    lines = [{"step": 0, "accuracy": 0.9}, {"step": 0, "accuracy": 0.25, "samples": samples}]
    write_lines(tmp_path / "evaluations.jsonl", lines)
    run = read_run(tmp_path)
    assert run.series("reward_mean") == ([0, 1, 2], [0.1, 0.3, 0.4])
    assert run.accuracies() == ([0], [0.25])


def test_hostile_text_stays_text(tmp_path):
    run_dir = write_run(tmp_path / "<script>alert(0)<!--")
    clusters = {"x": [0], "y": [0], "label": [0], "text": [f"{HOSTILE}<!--"]}
    (run_dir / "clusters.json").write_text(json.dumps(clusters))
    (run_dir / "config.yaml").write_text("policy:\n  model: </pre><script>alert(3)</script>\n")
    (run_dir / "summary.json").write_text(json.dumps({"</pre><script>": HOSTILE}))
    page = report(run_dir)
    assert [attributes for tag, attributes in page.elements if tag == "script"] == [
        {"type": "application/json", "id": "figures"},
        {},
        {},
    ]
    assert not [
        tag for tag, attributes in page.elements if tag == "img" or any(name[:2] == "on" for name in attributes)
    ]
    assert page.text.count("<script>alert(1)</script>") == 5  # prompt, answer, text before and after; the summary
    figures = json.loads(page.scripts[0])
    (hover,) = next(figure for figure in figures if figure["name"] == "map")["data"][0]["text"]
    assert "&lt;script&gt;" in hover
    assert "<script" not in hover


def test_nothing_is_loaded_and_no_foreign_script_may_run(tmp_path):
    page = report(write_run(tmp_path))
    loading = [
        (tag, name) for tag, attributes in page.elements for name in attributes if name in ("src", "href", "data")
    ]
    assert loading == []
    assert "@import" not in page.text
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy.split("script-src")[1]
    assert policy.count("'sha256-") == 2


def test_answers_stand_side_by_side_with_their_marks(tmp_path):
    text = report(write_run(tmp_path, num_steps=20, evaluate_every=20)).text
    table = text[text.index("Answers before and after") :]
    assert "Before (step 0)" in table
    assert "After (step 20)" in table
    # Four of the seven answers are right, on both sides.
    assert (table.count("✓ right"), table.count("✗ wrong")) == (8, 6)
    assert table.index("after 0") < table.index("after 20")


def test_every_figure_is_one_that_plotly_accepts(tmp_path):
    for num_steps in (1, 40, 300):  # markers, smoothed lines, areas instead of bars
        run_dir = write_run(tmp_path / str(num_steps), num_steps=num_steps, evaluate_every=1)
        plots, missing = plots_of(read_run(run_dir))
        assert (len(plots), missing) == (11, [])
        for plot in plots:
            json.dumps([plot.data, plot.layout], allow_nan=False)
            go.Figure(*_with_colors([plot.data, plot.layout]))


def _with_colors(value):
    """Names of CSS variables become a colour plotly knows."""
    if isinstance(value, dict):
        return {
            name: "#123456" if name.lower().endswith("color") else _with_colors(inner) for name, inner in value.items()
        }
    return [_with_colors(item) for item in value] if isinstance(value, list) else value


def test_a_reward_beyond_one_gets_its_own_scale(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 0, "reward_mean": 3.5}])
    write_lines(tmp_path / "evaluations.jsonl", [{"step": 0, "accuracy": 0.5, "num_prompts": 4}])
    (learning,), _ = plots_of(read_run(tmp_path))
    axes = {trace["name"]: trace.get("yaxis", "y") for trace in learning.data if "name" in trace}
    assert axes == {"reward mean of a step": "y", "95% interval": "y2", "held-out accuracy": "y2"}


def test_the_interval_of_a_share_is_wilsons():
    # z^2 = 3.8415. 0 of 10: the upper end is z^2 / (n + z^2) = 3.8415 / 13.8415. 5 of 10: 0.5 -+ z / sqrt(4 (n + z^2)).
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.72247, 1.0), abs=1e-5)
    assert wilson_interval(5, 10) == pytest.approx((0.5 - 0.26341, 0.5 + 0.26341), abs=1e-5)


def test_refits_are_marked_where_the_cluster_version_changes(tmp_path):
    plots, _ = plots_of(read_run(write_run(tmp_path)))
    (clusters,) = [plot for plot in plots if plot.name == "clusters"]
    assert [shape["x0"] for shape in clusters.layout["shapes"]] == [20]


def test_clouds_are_one_a_label_and_count_their_points():
    columns = {"x": [0, 1, 2, None], "y": [0, 1, 2, 3], "label": [9, -1, 9, 9], "text": ["a", "b", "", "d"]}
    clouds = clouds_of(columns)
    assert [cloud["name"] for cloud in clouds] == ["no cluster (1)", "cluster 9 (2)"]
    assert clouds[1]["text"] == ["a", "(empty)"]
    assert clouds[1]["marker"]["color"] == "--c2"  # 9 mod 8 = 1: the second colour, with the second symbol
    assert clouds[1]["marker"]["symbol"] == "diamond"


def test_thinned_rows_keep_the_first_and_the_last():
    rows = [{"step": step} for step in range(11)]
    assert [row["step"] for row in thinned(rows, 3)] == [0, 5, 10]
    assert thinned(rows, 11) == rows


def test_the_command_prints_the_path(tmp_path, capsys):
    assert main([str(write_run(tmp_path))]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert [path.name for path in tmp_path.glob(".*")] == []  # no half-written page is left


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda folder: folder.rmdir(), "run folder must be an existing folder"),
        (lambda folder: None, "run folder must hold metrics.jsonl or config.yaml"),
        (lambda folder: (folder / "metrics.jsonl").write_text("what\n{}\n"), "line 1"),
        (lambda folder: [(folder / name).mkdir(parents=True) for name in ("report.html/x",)], "run folder must hold"),
        (lambda folder: ((folder / "report.html").mkdir(), (folder / "config.yaml").touch()), "could not be written"),
    ],
)
def test_an_error_is_one_sentence_and_status_2(tmp_path, capsys, prepare, sentence):
    folder = tmp_path / "run"
    folder.mkdir()
    prepare(folder)
    assert main([str(folder)]) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert message.count("\n") == 1


def test_the_module_runs_as_a_program(tmp_path):
    run_dir = write_run(tmp_path, num_steps=2)
    command = [sys.executable, "-W", "error", "-m", "evaluation.report"]
    done = subprocess.run([*command, str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(run_dir / "report.html")
    shutil.rmtree(run_dir)
    failed = subprocess.run([*command, str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
