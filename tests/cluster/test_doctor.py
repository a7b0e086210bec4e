"""The doctor as a user calls it: what it says of run folders, and its exit status."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.doctor import main
from core.config import Config, dump_config
from core.evaluations import Evaluation, append_evaluation
from core.metrics import MetricsLog

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]


def lay(run_dir: Path, num_steps: int = 12, **changed: float) -> Path:
    """A run folder of `num_steps` steps that are well but for `changed`."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_config(Config(num_steps=20, run_dir=run_dir)))
    with MetricsLog(run_dir) as log:
        for step in range(num_steps):
            log.append({"step": step, "reward_mean": 0.5, "reward_std": 0.4, "truncated_share": 0.1} | changed)
    for step in (0, 8):
        append_evaluation(run_dir, Evaluation(step, 0.5, 64, 32, []))
    return run_dir


def asked(capsys: pytest.CaptureFixture[str], run_dir: Path) -> tuple[int, str, str]:
    status = main([str(run_dir)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_run_that_is_well_gets_0_and_is_told_so(tmp_path, capsys):
    status, out, err = asked(capsys, lay(tmp_path))
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == f"{tmp_path}: 12 steps, 2 evaluations"
    assert out.splitlines()[-1].startswith("nothing found")


def test_a_sick_run_gets_1_with_the_numbers_and_the_line_to_change(tmp_path, capsys):
    status, out, _ = asked(capsys, lay(tmp_path, truncated_share=0.6))
    assert status == 1
    assert "warning: answers_truncated: 60% of the answers are cut off at 24 tokens, 60% at the start" in out
    assert "  rollout.max_new_tokens=48 (now 24)" in out.splitlines()
    assert "  or learner.mask_truncated=true (now false)" in out.splitlines()


def test_a_young_run_is_judged_by_what_there_is(tmp_path, capsys):
    status, out, _ = asked(capsys, lay(tmp_path, num_steps=0))
    assert (status, "trends need 10 steps" in out) == (0, True)
    (tmp_path / "evaluations.jsonl").unlink()
    assert asked(capsys, tmp_path)[0] == 0


def test_the_command_itself_ends_with_the_status_and_without_ray_or_torch(tmp_path):
    program = "import sys, cluster.doctor; assert not {'ray', 'torch'} & set(sys.modules); cluster.doctor.main(['-h'])"
    command = [sys.executable, "-m", "cluster.doctor", str(lay(tmp_path, truncated_share=0.6))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, stdout=subprocess.DEVNULL).returncode == 0
    )


def test_memory_of_a_run_without_it_in_its_steps_is_read_from_the_summary(tmp_path, capsys):
    lay(tmp_path, memory_used_share=0.93)
    (tmp_path / "summary.json").write_text(json.dumps({"peak_memory_bytes": {"rollout engine": 3 << 30}}))
    assert "most of it by rollout engine (3.0 GiB)" in asked(capsys, tmp_path)[1]


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("metrics.jsonl", '{"step": 0}\nnonsense\n{"step": 2}\n', "metrics.jsonl line 2 must be a JSON object"),
        ("metrics.jsonl", "\x80\x81\n", "metrics.jsonl line 1 must be"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "metrics.jsonl line 1 must be"),
        ("evaluations.jsonl", "nonsense\n", "evaluations.jsonl line 1 must be an evaluation"),
        ("evaluations.jsonl", '{"step": 0, "accuracy": "high"}\n', "evaluations.jsonl line 1 must be an evaluation"),
        (
            "evaluations.jsonl",
            '{"step": 0, "accuracy": 7, "num_prompts": 4, "correct": 2, "samples": []}\n',
            "evaluations.jsonl line 1 must be an evaluation",
        ),
        ("summary.json", "{", "summary.json must be a JSON object"),
        ("summary.json", "[]", "summary.json must be a JSON object"),
        ("config.yaml", "num_steps: [", "could not be read as YAML"),
        ("config.yaml", "num_stepz: 4\n", "did you mean num_steps?"),
    ],
)
def test_a_broken_file_gets_2_and_one_sentence_that_names_it(tmp_path, capsys, file, content, told):
    lay(tmp_path)
    (tmp_path / file).write_text(content, encoding="latin-1")
    status, out, err = asked(capsys, tmp_path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert told in err


def test_no_run_folder_gets_2_and_one_sentence(tmp_path, capsys):
    for folder, told in ((tmp_path / "nothing", "which is no folder"), (tmp_path, "must hold config.yaml")):
        status, _, err = asked(capsys, folder)
        assert (status, err.count("\n"), told in err) == (2, 1, True)
    lay(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    status, _, err = asked(capsys, tmp_path)
    assert (status, err.count("\n"), "metrics.jsonl could not be read" in err) == (2, 1, True)


def test_a_line_that_is_being_written_is_left_out(tmp_path, capsys):
    lay(tmp_path)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (tmp_path / name).open("a") as stream:
            stream.write('{"step": 12, "rew')
    assert asked(capsys, tmp_path)[0] == 0
    append_evaluation(tmp_path, Evaluation(16, 0.5, 64, 32, []))  # after a kill: the torn line stays, closed off
    status, out, _ = asked(capsys, tmp_path)
    assert (status, "3 evaluations" in out) == (0, True)
