from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from reward.user_process import as_reward, batch_scorer

pytestmark = pytest.mark.fast


class Unshowable:
    def __repr__(self) -> str:
        raise KeyError


WRONG = [None, float("nan"), float("inf"), -np.inf, "1", b"1", [1.0], np.ones(1), 1j, np.complex64(1), np.str_("1")]


@pytest.mark.parametrize("value", [*WRONG, 10**400, object, Decimal("nan"), {}, Unshowable()])
def test_what_is_no_finite_number_is_wrong(value: Any) -> None:
    assert list(as_reward(value)) == ["wrong"]


def test_bools_numpy_scalars_fractions_and_decimals_are_numbers() -> None:
    values = [
        True,
        False,
        3,
        2.5,
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
        np.array(2.5),
        Fraction(1, 4),
        Decimal("0.1"),
    ]
    assert [as_reward(value)["value"] for value in values] == [1, 0, 3, 2.5, 0.5, 3, 1, 2.5, 0.25, 0.1]


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ([1.0], "1 scores for 4 samples"),
        ([1.0] * 3, "3 scores for 4 samples"),
        ([1.0] * 5, "5 scores for 4 samples"),
        ([], "0 scores for 4 samples"),
        (1.0, "1.0 instead of a list of 4 scores"),
        (np.float64(1), "instead of a list of 4 scores"),
        (None, "None instead of a list of 4 scores"),
        ("1111", "'1111' instead of a list of 4 scores"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "instead of a list of 4 scores"),
        (iter([1, 1, 1, 1]), "instead of a list of 4 scores"),
    ],
)
def test_a_batch_of_another_count_is_one_wrong_answer(values: Any, wrong: str) -> None:
    said: list[dict[str, Any]] = []
    job = {"prompt_id": "r1", "answer": "4", "samples": [0, 1, 2, 3], "texts": list("abcd")}
    batch_scorer(lambda prompt_id, answer, texts: values, "rewards.py")(job, lambda **message: said.append(message))
    assert len(said) == 1
    assert said[0]["sample"] is None
    assert wrong in said[0]["wrong"]


def test_one_wrong_value_in_a_batch_keeps_its_samples_number() -> None:
    said: list[dict[str, Any]] = []
    job = {"prompt_id": "r1", "answer": "4", "samples": [2, 5], "texts": list("ab")}
    batch_scorer(lambda prompt_id, answer, texts: [0.5, None], "rewards.py")(
        job, lambda **message: said.append(message)
    )
    assert said == [{"sample": 2, "value": 0.5}, {"sample": 5, "wrong": "None"}]


def test_an_array_is_a_list_of_scores() -> None:
    said: list[dict[str, Any]] = []
    job = {"prompt_id": "r1", "answer": "4", "samples": [0, 1], "texts": list("ab")}
    batch_scorer(lambda prompt_id, answer, texts: np.arange(2), "f.py")(job, lambda **message: said.append(message))
    assert said == [{"sample": 0, "value": 0.0}, {"sample": 1, "value": 1.0}]
