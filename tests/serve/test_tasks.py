"""Tasks of a version: held out, enough of them, and scored by the first reward term."""

from dataclasses import replace

import pytest

from core.config import RewardConfig, RewardTerm
from serve.artefacts.export import export_run
from serve.gate.tasks import heldout_tasks, score, training_texts
from tests.serve.trained import ANSWER, tasks_of

pytestmark = pytest.mark.fast


def test_heldout_tasks_are_as_many_as_asked_for_and_none_was_trained_on(tiny_model, tmp_path):
    made = export_run(tiny_model, tmp_path)
    config = {"num_steps": 1, "data": {"arithmetic": {"num_prompts": 100, "num_heldout": 8, "max_operand": 20}}}
    made = replace(made, origin=replace(made.origin, config=config))
    trained = set(training_texts(made, 1000))
    assert len(trained) == 100
    tasks = heldout_tasks(made, 300)
    assert len({prompt.text for prompt in tasks.prompts}) == len(tasks.prompts) == 300
    assert trained & {prompt.text for prompt in tasks.prompts} == set()
    assert tasks.notes == ()
    assert heldout_tasks(made, 300) == tasks


def test_a_task_that_runs_out_of_questions_says_so(tiny_model, tmp_path):
    made = export_run(tiny_model, tmp_path)
    arithmetic = {"num_prompts": 20, "num_heldout": 4, "max_operand": 3, "phrasings": "plain", "operations": ["+"]}
    made = replace(made, origin=replace(made.origin, config={"num_steps": 1, "data": {"arithmetic": arithmetic}}))
    tasks = heldout_tasks(made, 300)
    # 0..3 twice are 16 questions; 4 are held out, so that the 12 others are trained on and 4 are left
    assert (len(tasks.prompts), tasks.notes) == (4, ("300 held-out tasks asked for, 4 exist",))


def test_the_first_reward_term_counts_alone_and_unweighted():
    reward = RewardConfig(terms=(RewardTerm(kind="last_number", weight=0.2), RewardTerm(kind="exact", weight=5.0)))
    assert score(tasks_of(3, reward), [f"It is {ANSWER}.", "8", ANSWER]) == [1.0, 0.0, 1.0]
