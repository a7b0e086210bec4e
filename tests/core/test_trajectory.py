"""The group: columns that fit together, checked once and never changed."""

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from core.trajectory import Group, distinct_pairs, distinct_share

pytestmark = pytest.mark.fast


def group(**changes: object) -> Group:
    """Two answers, of 2 and 1 tokens."""
    columns = {
        "group_id": "0:p:0",
        "prompt_id": "p",
        "answer": "4",
        "prompt_tokens": np.array([5, 6, 7], np.int32),
        "tokens": np.array([1, 2, 3], np.int32),
        "offsets": np.array([0, 2, 3], np.int64),
        "behavior_logprobs": np.array([-0.5, -0.25, -1.0], np.float32),
        "version": np.array([0, 1, 1], np.int32),
        "finish_reason": ("stop", "length"),
        "loss_mask": np.array([True, True, False]),
        "cluster": 3,
        "cluster_version": 1,
        "text": ("a", "b"),
    }
    return Group(**{**columns, **changes})


def test_counts_and_answers_follow_the_offsets():
    made = group()
    assert (made.num_samples, made.num_tokens) == (2, 3)
    assert [made.answer_tokens(sample).tolist() for sample in range(2)] == [[1, 2], [3]]


def test_an_answer_may_be_empty():
    made = group(offsets=np.array([0, 0, 3]))
    assert made.answer_tokens(0).tolist() == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"offsets": np.array([0])}, "offsets must hold at least two entries"),
        ({"offsets": np.array([1, 2, 3])}, "offsets must rise from 0 to 3, got .1, 2, 3."),
        ({"offsets": np.array([0, 2, 4])}, "offsets must rise from 0 to 3"),
        ({"offsets": np.array([0, 4, 3])}, "offsets must rise from 0 to 3"),
        ({"prompt_tokens": np.array([], np.int32)}, "prompt_tokens must not be empty"),
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "behavior_logprobs must have 3 entries, got 2"),
        ({"version": np.zeros(4, np.int32)}, "version must have 3 entries, got 4"),
        ({"loss_mask": np.ones(2, bool)}, "loss_mask must have 3 entries, got 2"),
        ({"finish_reason": ("stop",)}, "finish_reason must have 2 entries, got 1"),
        ({"finish_reason": ("stop", "tired")}, "finish_reason"),
        ({"text": ("a", "b", "c")}, "text must have 2 entries, got 3"),
        ({"behavior_logprobs": np.array([-0.5, np.nan, 0], np.float32)}, "behavior_logprobs must be finite"),
        ({"behavior_logprobs": np.array([-0.5, -np.inf, 0], np.float32)}, "behavior_logprobs must be finite"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused_with_the_group_named(changes, sentence):
    with pytest.raises(ValueError, match=f"group 0:p:0: .*{sentence}"):
        group(**changes)


def test_neither_a_field_nor_a_number_in_it_can_be_changed():
    made = group()
    with pytest.raises(FrozenInstanceError):
        made.cluster = 4
    for name in ("prompt_tokens", "tokens", "offsets", "behavior_logprobs", "version", "loss_mask"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(made, name)[0] = 0


def test_a_group_survives_the_way_to_another_process():
    made, back = group(), pickle.loads(pickle.dumps(group(), protocol=5))
    for name in ("tokens", "offsets", "behavior_logprobs", "version", "loss_mask", "prompt_tokens"):
        np.testing.assert_array_equal(getattr(back, name), getattr(made, name))
        assert getattr(back, name).dtype == getattr(made, name).dtype
    assert (back.text, back.finish_reason, back.group_id) == (made.text, made.finish_reason, made.group_id)


def test_distinct_n_counts_pairs_inside_answers_only():
    # Answers 1 2 1, (none), 1 2 and 3: pairs 12 21 | 12, so two of three differ; tokens 1 2 1 1 2 3: three of six.
    made = group(
        tokens=np.array([1, 2, 1, 1, 2, 3], np.int32),
        offsets=np.array([0, 3, 3, 5, 6], np.int64),
        behavior_logprobs=np.zeros(6, np.float32),
        version=np.zeros(6, np.int32),
        finish_reason=("stop",) * 4,
        loss_mask=np.ones(6, bool),
        text=("a",) * 4,
    )
    assert distinct_pairs(made) == 2 / 3
    assert distinct_share(made.tokens) == 0.5


def test_distinct_n_of_nothing_is_nan():
    empty = group(
        tokens=np.zeros(0, np.int32),
        offsets=np.zeros(3, np.int64),
        behavior_logprobs=np.zeros(0, np.float32),
        version=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, bool),
    )
    assert np.isnan(distinct_pairs(empty))
    assert np.isnan(distinct_share(empty.tokens))
