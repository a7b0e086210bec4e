import pytest

from core.config import parse_config
from core.errors import UserError
from learners.schedule import learning_rate

pytestmark = pytest.mark.fast


def config(**learner):
    return parse_config({"num_steps": 8, "learner": {"learning_rate": 0.8, **learner}}, "test")


def test_warm_up_rises_to_the_full_rate_and_stays():
    rates = [learning_rate(config(warmup_steps=4), update) for update in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_linear_falls_to_one_share_before_zero():
    rates = [learning_rate(config(warmup_steps=4, schedule="linear"), update) for update in range(8)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.6, 0.4, 0.2])


def test_several_minibatches_stretch_the_linear_schedule():
    assert learning_rate(config(schedule="linear", num_minibatches=2), 8) == pytest.approx(0.4)


def test_a_linear_schedule_without_a_known_length_is_refused():
    by_epochs = parse_config({"num_epochs": 1, "learner": {"schedule": "linear"}}, "test")
    with pytest.raises(UserError, match="num_steps must be known"):
        learning_rate(by_epochs, 0)
