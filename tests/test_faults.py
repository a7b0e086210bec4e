"""kill -9 of everything, in whole runs on the tiny model: nothing is lost, nothing is doubled, nobody hangs."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import load_config
from data.schedule import prompts_of_step
from tests.runs import RunningTraining, audit, metrics, still_running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

CONFIG = """
seed: 3
prompts_per_step: 4
policy: {{model: {model}}}
data:
  max_prompt_tokens: 200
  arithmetic: {{num_prompts: 10, num_heldout: 4}}
rollout: {{samples_per_prompt: 4, max_new_tokens: 24, kv_cache_bytes: 67108864, dtype: float32, cpus: 1}}
reward: {{terms: [{{kind: python, path: {reward}}}]}}
grouping: {{num_clusters: 2, recompute_every: 3}}
learner: {{learning_rate: 1.0e-3, dtype: float32, cpus: 1}}
evaluation: {{every: 100, num_prompts: 4}}
checkpoint: {{every: 2, keep: 2}}
cluster: {{restart_backoff_s: 0.1}}
"""
# Any answer of the random model gets some reward, so that every group is informative; slow, so that a kill can hit it.
REWARD = """
import time

def score(prompt_id, answer, text):
    time.sleep(0.05)
    return float(sum(map(ord, text)) % 7)
"""


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD)
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG.format(model=tiny_model, reward=tmp_path / "reward.py"))
    return file


@pytest.fixture
def start(config: Path, tmp_path: Path) -> Iterator:
    runs: list[RunningTraining] = []

    def begin(*overrides: str) -> RunningTraining:
        runs.append(RunningTraining(config, tmp_path / "run", *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


def trained_ids(run_dir: Path) -> dict[int, list[str]]:
    """Prompt ids trained at each step of the surviving lineage."""
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        rows = ledger.execute("SELECT step, prompt_id FROM ends WHERE rolled_back_by IS NULL AND reason IS NULL")
        steps: dict[int, list[str]] = {}
        for step, prompt in rows:
            steps.setdefault(step, []).append(prompt)
    return {step: sorted(prompts) for step, prompts in steps.items()}


def planned_ids(run_dir: Path, num_steps: int) -> dict[int, list[str]]:
    """Prompt ids of each step of a run that nothing ever happened to."""
    config = load_config(run_dir / "config.yaml")
    with sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True) as ledger:
        ids = [row[0] for row in ledger.execute("SELECT prompt_id FROM prompts ORDER BY row")]
    return {step: sorted(ids[row] for _, row in prompts_of_step(config, len(ids), step)) for step in range(num_steps)}


def test_one_run_through_kill_9_of_its_driver_of_every_kind_of_worker_and_of_the_engine_below_one(start):
    settings = ["num_epochs=3", "learner.kl_coefficient=0.02", "learner.warmup_steps=4"]  # 9 steps: 4 + 4 + 2 prompts
    run = start(*settings, "max_staleness=0")
    run.wait_for(lambda: run.steps() >= 3, 240)  # one step beyond the checkpoint of step 2
    orphans = run.descendants()
    run.kill_driver()

    again = start(*settings, "max_staleness=1")
    before = again.steps()
    victims = ("RewardWorker", "RankActor", "RolloutWorker", "GroupingActor", "EngineCore")
    for done, title in enumerate(victims, start=1):
        again.wait_for(lambda done=done: again.steps() >= before + done, 240)
        again.worker(title).kill()
    assert again.wait(300) == 0, again.text()[-4000:]
    assert "going on from the checkpoint of step" in again.text()
    assert "new learners go on from the checkpoint of step" in again.text()

    proof = audit(run.run_dir)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert trained_ids(run.run_dir) == planned_ids(run.run_dir, 9)  # step by step those of an unbroken run
    lines = metrics(run.run_dir)
    assert lines[-1]["workers_replaced"] >= 4
    assert max(line["staleness_max"] for line in lines) == 1
    rates = {line["step"]: line["learning_rate"] for line in lines}
    assert [rates[step] for step in range(9)] == pytest.approx([1e-3 * min(1.0, (step + 1) / 4) for step in range(9)])
    assert abs(lines[-1]["kl_reference"]) > 0  # still against the first weights
    summary = json.loads((run.run_dir / "summary.json").read_text())
    assert summary["samples_trained"] == 3 * 10 * 4  # epochs x prompts x samples
    # Ray's two agents wait 60 s for an answer of the head that died with the driver, then go.
    assert still_running(orphans, within_s=90) == []
