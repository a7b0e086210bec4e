"""The gate: who is let through, who is not, and the sentence about it. Nothing starts here."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from core.config import RewardConfig, RewardTerm
from serve.artefacts.artefact import Artefact, Origin, flaw, load_artefact, store
from serve.artefacts.export import export_run
from serve.config import GateConfig, ServeConfig
from serve.gate.probe import Answers, golden_flaw
from serve.gate.verdict import decide, judge
from tests.serve.trained import ANSWER, tasks_of

pytestmark = pytest.mark.fast


def answers_of(texts: list[str], perplexity: float | None = 20.0) -> Answers:
    return Answers(texts, perplexity, [], 100.0, 1.0)


def right(num: int, num_wrong: int = 0) -> Answers:
    """Answers to tasks_of(num), the last num_wrong of them wrong."""
    return answers_of([ANSWER] * (num - num_wrong) + ["8"] * num_wrong)


def test_a_candidate_that_answers_as_the_full_model_does_passes():
    verdict = decide(right(400), right(400), tasks_of(400), GateConfig())
    assert (verdict.passed, verdict.reasons) == (True, ())
    assert (verdict.full_reward, verdict.candidate_reward, verdict.relative_loss) == (1.0, 1.0, 0.0)


def test_a_candidate_that_loses_one_answer_in_twenty_is_refused():
    verdict = decide(right(2000), right(2000, num_wrong=100), tasks_of(2000), GateConfig())
    assert not verdict.passed
    assert "a loss of 5.00%); more tasks would not change that" in verdict.reasons[0]
    assert verdict.needed_tasks is None


def test_too_few_tasks_are_refused_with_the_number_that_is_needed():
    verdict = decide(right(64), right(64), tasks_of(64), GateConfig())
    assert not verdict.passed
    assert f"needs about {verdict.needed_tasks} tasks to tell (gate.num_tasks)" in verdict.reasons[0]
    enough = verdict.needed_tasks or 0
    assert decide(right(enough), right(enough), tasks_of(enough), GateConfig()).passed


def test_a_full_model_that_earns_nothing_is_no_yardstick():
    verdict = decide(right(300, num_wrong=300), right(300), tasks_of(300), GateConfig())
    assert verdict.reasons == ("the full model must earn some reward to be compared with, got 0 on 300 tasks",)


@pytest.mark.parametrize(
    ("full", "candidate", "words"),
    [
        (20.0, 26.5, r"at most 26\.00 \(1\.3 x 20\.00 of the full model\), got 26\.50"),
        (20.0, None, "perplexity on the fixed text must be finite"),
        (None, 20.0, "the full model's perplexity must be finite"),
    ],
)
def test_a_perplexity_that_is_too_high_is_refused(full, candidate, words):
    verdict = decide(
        replace(right(400), perplexity=full), replace(right(400), perplexity=candidate), tasks_of(400), GateConfig()
    )
    assert not verdict.passed
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(verdict.reasons)


def test_a_first_version_is_judged_without_a_comparison():
    verdict = decide(None, right(8, num_wrong=2), tasks_of(8), GateConfig())
    assert (verdict.passed, verdict.full_reward, verdict.upper_bound, verdict.candidate_reward) == (
        True,
        None,
        None,
        0.75,
    )
    babble = decide(None, replace(right(8), perplexity=60_000.0), tasks_of(8), GateConfig())
    assert babble.reasons == ("perplexity on the fixed text must be at most 1000.00, got 60000.00",)


def test_rewards_outside_0_to_1_are_refused_with_a_sentence(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def score(prompt_id, answer, text):\n    return 10.0 if text == answer else 0.0\n")
    reward = RewardConfig(terms=(RewardTerm(kind="python", path=file), RewardTerm(kind="exact")))
    verdict = decide(right(20), right(20), tasks_of(20, reward), GateConfig())
    assert verdict.reasons == (
        "rewards must lie within 0 and 1 to be compared, got 10.0; use another first reward term",
    )


@pytest.mark.parametrize(
    ("text", "tokens", "logprobs", "words"),
    [
        ("5", [20, 2], [-0.1, -0.2], None),
        ("5", [20, 2], [-0.1, float("nan")], "must have finite log-probs, got nan"),
        (" \n", [20, 2], [-0.1, -0.1], "must not be empty"),
        ("!!!!!!!!", [3] * 8, [-0.1] * 8, "must not be one token over and over, got '!!!!!!!!'"),
        ("!!", [3] * 2, [-0.1] * 2, None),  # a short answer may repeat itself: 11
    ],
)
def test_a_golden_answer_that_no_working_model_gives_is_named(text, tokens, logprobs, words):
    found = golden_flaw("Say hello.", text, tokens, logprobs)
    assert found is None if words is None else found is not None and words in found


def test_a_damaged_candidate_is_refused_before_an_engine_starts(tiny_model, tmp_path):
    full = export_run(tiny_model, tmp_path)
    os.truncate(full.folder / "model.safetensors", 1000)
    verdict = judge(None, full, ServeConfig(serve_dir=tmp_path), tasks_of(4))
    assert not verdict.passed
    assert "model.safetensors must have" in verdict.reasons[0]
    stored = load_artefact(full.folder).gate
    assert stored is not None
    assert stored["passed"] is False


def test_a_candidate_with_nan_weights_is_refused_before_an_engine_starts(tiny_model, tmp_path):
    made = with_nan(export_run(tiny_model, tmp_path), tmp_path)
    assert flaw(made.folder) is None
    verdict = judge(None, made, ServeConfig(serve_dir=tmp_path), tasks_of(4))
    assert "must have finite weights, got model.norm.weight (1 of 64 numbers" in verdict.reasons[0]


def with_nan(artefact: Artefact, serve_dir: Path) -> Artefact:
    """A version whose hashes are right and whose weights are not: what a broken quantiser could leave."""

    def fill(folder: Path) -> None:
        for name in artefact.files:
            shutil.copyfile(artefact.folder / name, folder / name)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][5] = float("nan")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return store(serve_dir, fill, Origin("test"))
