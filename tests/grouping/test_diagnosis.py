import json
from pathlib import Path

import numpy as np
import pytest

from grouping.diagnosis import (
    cluster_sizes,
    label_churn,
    mean_similarity,
    principal_axes,
    reward_spread,
    tfidf_lift,
    tfidf_rows,
    words_of,
)
from grouping.pools import Pool

pytestmark = pytest.mark.fast


def test_tfidf_similarity_matches_the_golden_case() -> None:
    cases = json.loads((Path(__file__).parents[1] / "golden.json").read_text(encoding="utf-8"))["cases"]
    case = next(case for case in cases if case["id"] == "tfidf_intra_similarity")
    expected, tol = case["expected"], case["tol"]
    words, rows = tfidf_rows(case["inputs"]["docs"])
    assert words == expected["vocab"]
    np.testing.assert_allclose(rows.toarray(), expected["tfidf"], rtol=0, atol=tol)
    np.testing.assert_allclose((rows @ rows.T).toarray(), expected["cosine"], rtol=0, atol=tol)
    assert mean_similarity(rows) == pytest.approx(expected["intra_all"], abs=tol)
    assert mean_similarity(rows, np.array([0, 0, 1])) == pytest.approx(expected["intra_first_two"], abs=tol)


def test_numbers_become_their_count_of_digits() -> None:
    assert words_of("What is 12 + 7?") == ["what", "is", "<num_2>", "+", "<num_1>", "?"]


def test_lift_is_one_for_pure_topics_and_low_for_mixed_ones() -> None:
    texts = [f"What is {i} + {i}?" for i in range(6)] + [f"Prove lemma number {i}." for i in range(6)]
    assert tfidf_lift(texts, np.repeat([0, 1], 6)) == pytest.approx(1.0)
    assert tfidf_lift(texts, np.tile([0, 1], 6)) < 0.0  # fewer pairs of one topic than chance: 3 and 3 in each


def test_lift_of_random_labels_is_zero_on_average() -> None:
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(["add", "two", "take", "away", "sum"], 3)) for _ in range(30)]
    lifts = [tfidf_lift(texts, draw.permutation(np.repeat(range(3), 10))) for _ in range(25)]
    assert abs(np.mean(lifts)) < 4 * np.std(lifts) / np.sqrt(25)


@pytest.mark.parametrize("texts", [[], ["", " "], ["same", "same"]])
def test_lift_of_nothing_to_tell_apart_is_zero(texts: list[str]) -> None:
    assert tfidf_lift(texts, np.zeros(len(texts), dtype=np.int64)) == 0.0


def test_churn_counts_rows_that_moved_not_new_numbers() -> None:
    before = np.array([0, 0, 0, 1, 1, -1])
    assert label_churn(before, np.array([5, 5, 5, 2, 2, 2])) == 0.0
    assert label_churn(before, np.array([1, 1, 0, 0, 0, 0])) == pytest.approx(1 / 5)
    assert label_churn(np.full(3, -1), np.zeros(3, dtype=np.int64)) == 0.0


def test_sizes_leave_out_rows_set_aside() -> None:
    assert cluster_sizes(np.array([0, 2, 2, -1]), 4).tolist() == [1, 0, 2, 0]


def pool(between: float | None, weight: float) -> Pool:
    return Pool(mean=0.5, within=0.2, between=between, mean_noise=0.0, num_prompts=4, weight=weight)


def test_icc_is_the_share_of_the_spread_between_clusters() -> None:
    spread = reward_spread(
        {0: pool(0.02, 3.0), 1: pool(-0.02, 1.0), 2: pool(None, 9.0), -1: pool(9.0, 9.0)}, pool(0.05, 4)
    )
    # tau2 = (3*0.02 - 1*0.02)/4 = 0.01; icc = 1 - 0.01/0.05
    assert spread == pytest.approx({"s2": 0.2, "tau2": 0.01, "tau2_global": 0.05, "icc": 0.8})


def test_what_cannot_be_estimated_is_left_out() -> None:
    assert reward_spread({0: pool(None, 1.0)}, pool(None, 1.0)) == {"s2": 0.2}
    assert reward_spread({}, None) == {}


def test_the_map_keeps_the_two_widest_directions() -> None:
    vectors = np.array([[3.0, 0.0, 0.1], [-3.0, 0.0, 0.1], [0.0, 1.0, 0.1], [0.0, -1.0, 0.1]])
    np.testing.assert_allclose(principal_axes(vectors), [[3, 0], [-3, 0], [0, 1], [0, -1]], atol=1e-12)
    assert principal_axes(np.ones((2, 1))).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert principal_axes(np.zeros((0, 3))).shape == (0, 2)
