"""Whether the clusters mean anything: topical coherence, how much of the difficulty they explain, churn, sizes."""

import re
from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer

from grouping.clusters import shared_rows
from grouping.pools import Pool

_NUMBER = re.compile(r"\d+")
_TOKEN = re.compile(r"<num_\d+>|\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Lower-case words and signs; a number becomes <num_k>, k its count of digits, or operands drown the topic."""
    return _TOKEN.findall(_NUMBER.sub(lambda match: f"<num_{len(match[0])}>", text.lower()))


def tfidf_rows(docs: Sequence[list[str]]) -> tuple[list[str], csr_matrix]:
    """The sorted vocabulary [V] and unit TF-IDF rows [N, V]: raw counts times ln((1+N)/(1+df)) + 1."""
    if not any(docs):
        return [], csr_matrix((len(docs), 0))
    vectorizer = TfidfVectorizer(analyzer=list, norm="l2", smooth_idf=True)
    rows = vectorizer.fit_transform(docs)
    return list(vectorizer.get_feature_names_out()), rows


def mean_similarity(rows: csr_matrix, labels: np.ndarray | None = None) -> float:
    """Mean cosine over the pairs of rows [N, V] that share a label [N] (all pairs without labels); 0 with no pair.

    |sum of a cluster's rows|^2 counts each pair twice and each row with itself once.
    """
    labels = np.zeros(rows.shape[0], dtype=np.int64) if labels is None else labels
    total, num_pairs = 0.0, 0
    for label in np.unique(labels[labels >= 0]):
        part = rows[labels == label]
        total += float(np.sum(np.asarray(part.sum(axis=0)) ** 2) - part.multiply(part).sum())
        num_pairs += part.shape[0] * (part.shape[0] - 1)
    return total / num_pairs if num_pairs else 0.0


def tfidf_lift(texts: Sequence[str], labels: np.ndarray) -> float:
    """How much more alike texts are inside clusters than under random labels: (I - I_rand)/(1 - I_rand).

    I_rand is exact: random labels draw pairs evenly, so it is the mean over all pairs.
    """
    inside = labels >= 0
    _, rows = tfidf_rows([words_of(text) for text, there in zip(texts, inside, strict=True) if there])
    random = mean_similarity(rows)
    if random >= 1.0 - 1e-12:
        return 0.0
    return (mean_similarity(rows, labels[inside]) - random) / (1.0 - random)


def label_churn(before: np.ndarray, after: np.ndarray) -> float:
    """Share of rows [N] that left their cluster, once new clusters are matched with old ones by the rows they share.

    Rows set aside before or after do not count; 0 with no row to compare.
    """
    shared = shared_rows(before, after, int(after.max(initial=0)) + 1)
    total = int(shared.sum())
    return 1.0 - int(shared[linear_sum_assignment(-shared)].sum()) / total if total else 0.0


def cluster_sizes(labels: np.ndarray, num_clusters: int) -> np.ndarray:
    """Rows in each cluster [K], those set aside left out."""
    return np.bincount(labels[labels >= 0], minlength=num_clusters)


def reward_spread(clusters: dict[int, Pool], everyone: Pool | None) -> dict[str, float]:
    """s2, tau2, tau2_global and icc of the discounted rewards; a number that cannot be estimated yet is left out.

    tau2 is the mean within-cluster variance of prompts' mean rewards, weighted by groups; tau2_global the same with all
    prompts in one cluster; icc = 1 - tau2/tau2_global, the share of the difficulty that the clusters explain.
    """
    spread: dict[str, float] = {}
    if everyone is not None and everyone.within is not None:
        spread["s2"] = everyone.within
    known = [(pool.weight, pool.between) for label, pool in clusters.items() if label >= 0 and pool.between is not None]
    if known:
        weights, between = np.array(known).T
        spread["tau2"] = max(0.0, float(np.average(between, weights=weights)))
    if everyone is not None and everyone.tau2 is not None:
        spread["tau2_global"] = everyone.tau2
    if "tau2" in spread and spread.get("tau2_global", 0.0) > 0:
        spread["icc"] = min(1.0, max(0.0, 1.0 - spread["tau2"] / spread["tau2_global"]))
    return spread


def principal_axes(vectors: np.ndarray) -> np.ndarray:
    """The rows [N, D] on their two axes of largest variance [N, 2]; an axis's largest entry is positive."""
    if len(vectors) == 0:
        return np.zeros((0, 2))
    centred = vectors.astype(np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    axes = np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :2]  # eigh: ascending
    largest = axes[np.argmax(np.abs(axes), axis=0), range(axes.shape[1])]
    points = centred @ (axes * np.sign(largest))
    return np.pad(points, ((0, 0), (0, 2 - points.shape[1])))
