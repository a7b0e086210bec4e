import json
from pathlib import Path

import faiss
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from grouping.clusters import assign, drifted, fit_centroids, mean_cosine, order_like, unit_rows

pytestmark = pytest.mark.fast


def topics(num_topics: int, each: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows [num_topics*each, width] close around well separated directions."""
    draw = np.random.default_rng(seed)
    centres = np.eye(width)[:num_topics]
    return np.concatenate([c + 0.05 * draw.standard_normal((each, width)) for c in centres])


def partition(vectors: np.ndarray, num_clusters: int, seed: int = 0) -> np.ndarray:
    return assign(vectors, fit_centroids(vectors, num_clusters, seed).centroids)


def test_assignment_and_drift_match_the_golden_case() -> None:
    cases = json.loads((Path(__file__).parents[1] / "golden.json").read_text(encoding="utf-8"))["cases"]
    case = next(case for case in cases if case["id"] == "skmeans_assign_ema")
    expected, tol = case["expected"], case["tol"]
    vectors, centroids = (np.array(case["inputs"][name]) for name in ("embeddings", "centroids"))
    labels = assign(vectors, centroids)
    assert labels.tolist() == expected["labels"]
    assert mean_cosine(vectors, labels, centroids) == pytest.approx(expected["mean_cos"], abs=tol)
    moved = drifted(centroids, vectors, labels, case["params"]["beta"])
    np.testing.assert_allclose(moved, expected["centroids"], rtol=0, atol=tol)
    np.testing.assert_allclose(1 - np.sum(moved * centroids, axis=1), expected["centroid_shift"], rtol=0, atol=tol)


def test_equal_cosines_go_to_the_lowest_label() -> None:
    assert assign(np.ones((30, 2)), np.eye(2)).tolist() == [0] * 30


def test_topics_become_clusters() -> None:
    vectors = topics(4, 20, 13)
    assert adjusted_rand_score(np.repeat(range(4), 20), partition(vectors, 4)) == 1.0


@pytest.mark.parametrize(("num_rows", "asked", "made"), [(3, 8, 3), (8, 8, 8), (1, 1, 1), (5, 1, 1)])
def test_never_more_clusters_than_rows(num_rows: int, asked: int, made: int, capfd: pytest.CaptureFixture) -> None:
    vectors = np.random.default_rng(0).standard_normal((num_rows, 7))
    fit = fit_centroids(vectors, asked, seed=0)
    labels = assign(vectors, fit.centroids)
    assert len(fit.centroids) == made
    assert bool(fit.notes) == (made < asked)
    assert set(labels.tolist()) <= set(range(made))
    assert made != num_rows or sorted(labels.tolist()) == list(range(num_rows))
    assert capfd.readouterr() == ("", "")  # no warning about 39 points a centroid


def test_copies_of_a_row_count_once() -> None:
    fit = fit_centroids(np.ones((40, 5)), 4, seed=0)
    assert len(fit.centroids) == 1
    assert fit.notes == ("4 clusters asked for, 1 made: there are only 1 different texts",)


@pytest.mark.parametrize("num_clusters", [0, -1])
def test_no_cluster_is_refused(num_clusters: int) -> None:
    with pytest.raises(ValueError, match=f"num_clusters must be at least 1, got {num_clusters}"):
        fit_centroids(np.eye(4), num_clusters, seed=0)


@pytest.mark.parametrize("vectors", [np.zeros((0, 4)), np.zeros((3, 4)), np.full((2, 4), np.nan)])
def test_nothing_to_cluster_is_refused(vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match="at least one usable row"):
        fit_centroids(vectors, 2, seed=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0])
def test_a_bad_row_is_set_aside_and_the_good_ones_group_as_without_it(bad: float) -> None:
    good = topics(2, 5, 7)
    labels = partition(np.insert(good, 4, np.full(7, bad), axis=0), 2)
    assert labels[4] == -1
    assert np.delete(labels, 4).tolist() == partition(good, 2).tolist()


FORMS = {
    "float32": lambda x: x.astype(np.float32),
    "fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1][::-1],
    "float16": lambda x: x.astype(np.float16),
    "scaled": lambda x: 37.0 * x,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_vectors_does_not_change_the_groups(form: str) -> None:
    vectors = topics(2, 20, 13)
    assert adjusted_rand_score(partition(vectors, 2), partition(FORMS[form](vectors), 2)) == 1.0


def test_neither_row_order_nor_threads_nor_a_second_run_change_a_bit() -> None:
    vectors = np.random.default_rng(1).standard_normal((400, 24))  # no structure: any difference would show
    first = fit_centroids(vectors, 8, seed=3, max_points_per_centroid=40).centroids
    order = np.random.default_rng(2).permutation(len(vectors))
    before = faiss.omp_get_max_threads()
    try:
        for threads in (1, 2):
            faiss.omp_set_num_threads(threads)
            again = fit_centroids(vectors[order], 8, seed=3, max_points_per_centroid=40).centroids
            assert again.tobytes() == first.tobytes()
            assert faiss.omp_get_max_threads() == threads  # left as it was
    finally:
        faiss.omp_set_num_threads(before)


def test_the_seed_changes_the_fit() -> None:
    vectors = np.random.default_rng(1).standard_normal((400, 24))
    assert adjusted_rand_score(partition(vectors, 8, seed=0), partition(vectors, 8, seed=1)) < 1.0


def test_a_table_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"table of rows, got shape \(3,\)"):
        unit_rows(np.ones(3))


def test_an_empty_cluster_stays_and_opposite_rows_do_not_break_it() -> None:
    centroids = np.eye(2)
    opposite = np.array([[-1.0, 0.0]])
    assert drifted(centroids, opposite, np.array([0]), 0.5).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert mean_cosine(opposite, np.array([-1]), centroids) == 0.0


def test_new_clusters_take_the_numbers_of_the_old_ones_they_share_rows_with() -> None:
    before = np.array([0, 0, 0, 1, 1, 2, 2, -1])
    after = np.array([2, 2, 1, 1, 1, 0, 0, 0])
    # new 2 keeps old 0 (2 rows of 3), new 1 keeps old 1, new 0 keeps old 2, new 3 is without rows and goes last
    assert order_like(before, after, 4).tolist() == [2, 1, 0, 3]


def test_without_old_labels_the_order_stays() -> None:
    assert order_like(np.full(5, -1), np.array([0, 2, 1, 1, 0]), 3).tolist() == [0, 1, 2]
