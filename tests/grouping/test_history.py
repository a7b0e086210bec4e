import numpy as np
import pytest

from grouping.history import History

pytestmark = pytest.mark.fast


def test_the_mean_is_the_discounted_mean_of_the_groups() -> None:
    history = History(0.5)
    history.add(0, "a", 0, np.array([1.0, 1.0]))
    history.add(2, "a", 0, np.array([0.0, 0.0]))
    history.add(1, "b", 1, np.array([0.5, 0.5]))
    pool = history.pools(2, np.zeros(2, dtype=np.int64))[0]
    # weights at step 2: a's groups 0.25 and 1, b's 0.5; (0.25*1 + 1*0 + 0.5*0.5) / 1.75
    assert pool.weight == pytest.approx(1.75)
    assert pool.mean == pytest.approx(0.5 / 1.75)


def test_the_sampling_noise_is_that_of_a_weighted_mean() -> None:
    history = History(0.5)
    history.add(0, "a", 0, np.array([1.0, 0.0]))
    history.add(1, "a", 0, np.array([1.0, 0.0, 1.0, 0.0]))
    moments = history.moments(1)
    # mean = (0.5*m0 + 1*m1)/1.5: variance s2*(0.25/2 + 1/4)/2.25
    assert moments.noise[0] == pytest.approx((0.25 / 2 + 1 / 4) / 2.25)


def test_labels_may_change_between_reads() -> None:
    history = History(1.0)
    for name, value in (("a", 0.0), ("b", 1.0), ("c", 0.4)):
        history.add(0, name, 0, np.array([value, value]))
    assert history.pools(0, np.array([0, 0, 1]))[0].mean == pytest.approx(0.5)
    assert history.pools(0, np.array([0, 1, 0]))[0].mean == pytest.approx(0.2)


def test_weights_that_faded_out_give_no_pool_and_no_nan() -> None:
    history = History(0.5)
    history.add(0, "a", 0, np.array([1.0, 0.0]))
    assert history.pools(5000, np.zeros(1, dtype=np.int64)) == {}
    history.add(5000, "a", 0, np.array([1.0, 0.0]))
    assert history.pools(5000, np.zeros(1, dtype=np.int64))[0].mean == 0.5


def test_a_stored_history_goes_on_the_same() -> None:
    def turn(history: History, step: int) -> None:
        for i in range(50):
            history.add(step, f"p{step % 3}-{i}", i, np.array([(i * step) % 2, 1.0, 0.0]))

    first = History(0.9)
    for step in range(4):
        turn(first, step)
    second = History(0.9)
    second.load(first.prompt_ids, first.arrays())
    for history in (first, second):
        turn(history, 4)
        turn(history, 5)
    assert first.prompt_ids == second.prompt_ids
    for name, values in first.arrays().items():
        assert values.tobytes() == second.arrays()[name].tobytes()
