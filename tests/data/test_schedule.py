from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import parse_config
from data.schedule import num_steps_of, prompts_of_step, steps_per_epoch

pytestmark = pytest.mark.fast

any_size = st.integers(1, 60)


def config_of(seed: int, prompts_per_step: int) -> SimpleNamespace:
    return SimpleNamespace(seed=seed, prompts_per_step=prompts_per_step)


@settings(deadline=None, max_examples=100, database=None)
@given(seed=st.integers(0, 2**31 - 1), per_step=any_size, num_rows=any_size, epoch=st.integers(0, 5))
def test_every_epoch_holds_every_row_once(seed, per_step, num_rows, epoch):
    config = config_of(seed, per_step)
    length = steps_per_epoch(config, num_rows)
    asked = [prompts_of_step(config, num_rows, step) for step in range(epoch * length, (epoch + 1) * length)]
    assert sorted(pair for step in asked for pair in step) == [(epoch, row) for row in range(num_rows)]
    # Full steps, then what is left of num_rows, which is never nothing
    assert [len(step) for step in asked[:-1]] == [per_step] * (length - 1)
    assert len(asked[-1]) == num_rows - per_step * (length - 1) >= 1


@settings(deadline=None, max_examples=50, database=None)
@given(seed=st.integers(0, 100), per_step=any_size, num_rows=any_size, steps=st.lists(st.integers(0, 500), max_size=8))
def test_a_step_does_not_depend_on_what_was_asked_before(seed, per_step, num_rows, steps):
    config = config_of(seed, per_step)
    there = [prompts_of_step(config, num_rows, step) for step in steps]
    back = [prompts_of_step(config, num_rows, step) for step in reversed(steps)]
    assert there == back[::-1]


def test_epochs_and_seeds_shuffle_differently():
    # One step an epoch; 50 rows shuffled twice alike by chance: 1 in 50!
    orders = [
        tuple(row for _, row in prompts_of_step(config_of(seed, 50), 50, step))
        for seed, step in [(0, 0), (0, 1), (1, 0), (1, 1), (11, 0), (0, 10)]
    ]
    assert len(set(orders)) == len(orders)
    assert tuple(range(50)) not in orders


def test_the_shuffle_of_a_seed_is_the_same_in_every_process_and_release():
    # Pinned: a resumed run must ask for the same rows under another interpreter
    first, second = (prompts_of_step(config_of(0, 3), 5, step) for step in (0, 1))
    assert [row for _, row in first + second] == [1, 3, 2, 4, 0]


def test_the_run_ends_after_its_steps_or_its_epochs():
    by_steps = parse_config({"num_steps": 7, "prompts_per_step": 4}, "test")
    by_epochs = parse_config({"num_epochs": 3, "prompts_per_step": 4}, "test")
    assert num_steps_of(by_steps, 10) == 7
    # 10 rows at 4 a step: 4 + 4 + 2, three steps an epoch
    assert num_steps_of(by_epochs, 10) == 9
    assert num_steps_of(by_epochs, 3) == 3


def test_a_step_below_zero_and_an_empty_dataset_are_refused():
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        prompts_of_step(config_of(0, 4), 10, -1)
    with pytest.raises(ValueError, match="num_rows must be at least 1, got 0"):
        prompts_of_step(config_of(0, 4), 0, 0)
