"""What the run says while it goes on: each trouble once."""

import pytest

from core.config import Config
from core.evaluations import Evaluation
from core.watch.watcher import NUM_KEPT, Watcher

pytestmark = pytest.mark.fast
CONFIG = Config(num_steps=100)


def test_a_trouble_is_said_once_and_again_only_when_it_gets_worse():
    watcher = Watcher(CONFIG, [], [])
    said = []
    for step in range(30):
        watcher.step({"step": step, "memory_used_share": 0.5 if step < 5 else 0.92 if step < 20 else 0.97})
        said += [(step, finding.check, finding.severity) for finding in watcher.news()]
    assert said == [(5, "memory_short", "warning"), (20, "memory_short", "critical")]


def test_a_resumed_run_is_judged_with_the_steps_of_before():
    before = [{"step": step, "truncated_share": 0.6} for step in range(9)]
    watcher = Watcher(CONFIG, before, [Evaluation(0, 0.9, 64, 58, []), Evaluation(8, 0.5, 64, 32, [])])
    watcher.step({"step": 9, "truncated_share": 0.6})
    watcher.evaluation(Evaluation(8, 0.5, 64, 32, []))  # once more, after a resume: not a second one
    watcher.evaluation(Evaluation(16, 0.5, 64, 32, []))
    assert [finding.check for finding in watcher.news()] == ["heldout_declining", "answers_truncated"]
    assert [one.step for one in watcher.history().evaluations] == [0, 8, 16]


def test_measures_are_there_once_they_can_be_told():
    watcher = Watcher(CONFIG, [], [])
    assert watcher.measures() == {}
    for step in range(10):
        watcher.step({"step": step, "reward_mean": 0.5, "reward_std": 0.4})
    assert watcher.measures() == {"reward_volatility": 0.0}


def test_a_long_run_keeps_its_opening_and_its_newest_steps_only():
    watcher = Watcher(CONFIG, [], [])
    for step in range(2 * NUM_KEPT):
        watcher.step({"step": step})
    steps = [row["step"] for row in watcher.history().steps]
    assert steps == [*range(5), *range(NUM_KEPT, 2 * NUM_KEPT)]


@pytest.mark.parametrize("back_to", [3, 12])
def test_steps_that_were_rolled_back_are_forgotten(back_to):
    watcher = Watcher(CONFIG, [], [])
    for step in [*range(20), *range(back_to, 21)]:
        watcher.step({"step": step})
    assert [row["step"] for row in watcher.history().steps] == list(range(21))
