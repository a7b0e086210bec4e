"""Spherical K-means with FAISS: fit, assignment by cosine, and the slow drift of centroids between fits.

Legend: N vectors, K clusters, D width. Label -1 is the bucket of rows that have no direction: NaN, infinite or zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np
from scipy.optimize import linear_sum_assignment

SET_ASIDE = -1
NUM_ITERATIONS = 25
NUM_RESTARTS = 3


@dataclass(frozen=True)
class Fit:
    centroids: np.ndarray  # [K, D] float64, unit length
    notes: tuple[str, ...]  # what was not done as asked, a sentence each


def unit_rows(vectors: np.ndarray) -> np.ndarray:
    """The rows [N, D] at unit length, C-contiguous float32; a row without a direction becomes 0.

    Raises ValueError where `vectors` is not a table.
    """
    table = np.array(vectors, dtype=np.float64, order="C")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"vectors must be a table of rows, got shape {table.shape}")
    table[~np.isfinite(table).all(axis=1)] = 0.0
    length = np.linalg.norm(table, axis=1, keepdims=True)
    table = np.divide(table, length, out=np.zeros_like(table), where=length > 1e-12)
    return np.ascontiguousarray(table, dtype=np.float32)


def fit_centroids(
    vectors: np.ndarray, num_clusters: int, seed: int, max_points_per_centroid: int = 256, device: str = "cpu"
) -> Fit:
    """Centroids of the usable rows [N, D]; the same for any order, dtype or layout of the rows and any thread count.

    Fewer different rows than clusters: fewer clusters, with a note. ValueError for no usable row or num_clusters < 1.
    """
    if num_clusters < 1:
        raise ValueError(f"num_clusters must be at least 1, got {num_clusters} (grouping.num_clusters)")
    rows = unit_rows(vectors)
    # Sorted: K-means draws its first centroids by position, so the rows need an order that is their own.
    points = np.unique(rows[rows.any(axis=1)], axis=0)
    if len(points) == 0:
        raise ValueError(f"vectors must hold at least one usable row to cluster, got none among {len(rows)}")
    notes = []
    if len(points) < num_clusters:
        notes.append(
            f"{num_clusters} clusters asked for, {len(points)} made: there are only {len(points)} different texts"
        )
        num_clusters = len(points)
    if len(points) > num_clusters * max_points_per_centroid:
        chosen = np.random.default_rng(seed).choice(len(points), num_clusters * max_points_per_centroid, replace=False)
        points = np.ascontiguousarray(points[np.sort(chosen)])
    gpu = device == "cuda" and getattr(faiss, "get_num_gpus", int)() > 0
    if device == "cuda" and not gpu:
        notes.append("grouping.device is cuda, but this FAISS sees no GPU: clusters are fitted on the CPU")
    kmeans = faiss.Kmeans(
        points.shape[1],
        num_clusters,
        spherical=True,
        niter=NUM_ITERATIONS,
        nredo=NUM_RESTARTS,
        seed=seed % 2**31,
        min_points_per_centroid=1,  # FAISS warns below 39; a small data set is no mistake here
        max_points_per_centroid=max_points_per_centroid,
        gpu=gpu,
    )
    with _one_thread():
        kmeans.train(points)
    return Fit(unit_rows(np.asarray(kmeans.centroids)).astype(np.float64), tuple(notes))


def assign(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """The label [N] int64 of each row [N, D]: the centroid [K, D] of largest cosine, the first of equals; or -1."""
    rows = unit_rows(vectors)
    usable = rows.any(axis=1)
    labels = np.full(len(rows), SET_ASIDE, dtype=np.int64)
    if usable.any():
        with _one_thread():
            targets = np.ascontiguousarray(centroids, dtype=np.float32)
            _, nearest = faiss.knn(np.ascontiguousarray(rows[usable]), targets, 1, metric=faiss.METRIC_INNER_PRODUCT)
        labels[usable] = nearest[:, 0]
    return labels


def mean_cosine(vectors: np.ndarray, labels: np.ndarray, centroids: np.ndarray) -> float:
    """Mean cosine of the unit rows [N, D] with the centroids of their labels [N]; 0 with no row in a cluster."""
    inside = labels >= 0
    if not inside.any():
        return 0.0
    return float(np.mean(np.einsum("nd,nd->n", vectors[inside], centroids[labels[inside]], dtype=np.float64)))


def drifted(centroids: np.ndarray, vectors: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Centroids [K, D] after c <- norm((1 - share) c + share * mean of its rows); one without rows stays."""
    moved = centroids.copy()
    for label in np.unique(labels[labels >= 0]):
        mean = np.mean(vectors[labels == label], axis=0, dtype=np.float64)
        target = (1.0 - share) * centroids[label] + share * mean
        length = np.linalg.norm(target)
        if length > 1e-12:  # opposite vectors may cancel
            moved[label] = target / length
    return moved


def order_like(before: np.ndarray, after: np.ndarray, num_after: int) -> np.ndarray:
    """The order [num_after] in which new clusters best keep the old ones' numbers, from both labels [N] of rows.

    New cluster order[i] gets number i. Clusters are matched by shared rows (Hungarian method); unmatched ones go last.
    """
    shared = shared_rows(before, after, num_after)
    new, old = linear_sum_assignment(-shared)
    wish = np.full(num_after, shared.shape[1], dtype=np.int64)
    wish[new] = old
    return np.argsort(wish, kind="stable")


def shared_rows(before: np.ndarray, after: np.ndarray, num_after: int) -> np.ndarray:
    """Rows shared by new and old cluster [num_after, num_before], of rows in a cluster both times."""
    both = (before >= 0) & (after >= 0)
    num_before = int(before.max(initial=0)) + 1
    table = np.zeros((num_after, num_before), dtype=np.int64)
    np.add.at(table, (after[both], before[both]), 1)
    return table


@contextmanager
def _one_thread() -> Iterator[None]:
    """One OpenMP thread in FAISS: sums in one order whatever the machine, and no clash with torch's own OpenMP."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
