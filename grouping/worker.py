"""The grouping worker: which prompts belong together, and how much better each answer was than its baseline.

Life of a step t: `label` before rollout (from the prompt alone), `judge` once rewards are in. judge uses rewards of
steps before t for the baseline; then it takes t's rewards in, moves the centroids a little, and refits them when due.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.config import GroupingConfig
from grouping.clusters import SET_ASIDE, assign, drifted, fit_centroids, mean_cosine, order_like
from grouping.diagnosis import cluster_sizes, label_churn, principal_axes, reward_spread, tfidf_lift
from grouping.embeddings import Encoder
from grouping.history import History
from grouping.judgement import Judgement, ScoredGroup, checked_groups, judge_groups, step_metrics
from grouping.pools import Pool
from grouping.snapshot import Snapshot, pack, unpack
from grouping.texts import KnownTexts

logger = logging.getLogger(__name__)

FIRST_POINTS_PER_CENTROID = 39  # FAISS's own minimum for a sound fit: the start need not wait for more to be encoded
MAX_MAP_POINTS = 1000


class GroupingWorker:
    """Plain Python; one process owns one. Everything but the encoder is in `state`."""

    def __init__(self, config: GroupingConfig, seed: int, encoder: Encoder | None = None) -> None:
        self._config = config
        self._seed = seed
        self._encoder = encoder or Encoder(config.encoder, config.device)
        self._texts = KnownTexts(self._encoder.encode, self._encoder.width)
        self._history = History(config.history_discount)
        self._centroids: np.ndarray | None = None  # [K, D] float64
        self._version = 0  # of the clusters: counts refits
        self._steps_since_fit = 0
        self._last_step = -1
        self._tfidf_lift = 0.0
        self._notes: list[str] = []

    def fit(self, texts: list[str]) -> None:
        """The first clusters, from a seeded sample of the texts small enough to encode at once.

        Raises ValueError where no text can be embedded, RuntimeError where clusters are there already.
        """
        if self._centroids is not None:
            raise RuntimeError(
                "clusters are fitted already; later fits happen in judge, every grouping.recompute_every steps"
            )
        different = sorted(set(texts))
        most = self._config.num_clusters * min(FIRST_POINTS_PER_CENTROID, self._config.max_points_per_centroid)
        if len(different) > most:
            chosen = np.random.default_rng(self._seed).choice(len(different), most, replace=False)
            different = [different[i] for i in np.sort(chosen)]
        self._texts.rows(different)
        self._fit()

    def label(self, texts: list[str]) -> list[tuple[int, int]]:
        """The cluster and the cluster version of each text; cluster -1 for one without a direction (empty, blank)."""
        labels = self._relabel(self._texts.rows(texts))
        return [(int(label), self._version) for label in labels]

    def judge(self, step: int, groups: Sequence[ScoredGroup]) -> Judgement:
        """The Judgement of one step's groups. Raises ValueError for a bad reward and for a step that is not later."""
        start = time.perf_counter()
        if step <= self._last_step:
            raise ValueError(
                f"step must be later than the last judged ({self._last_step}), got {step}; restore an older state"
            )
        checked = checked_groups(groups)
        rewards = [values for _, values in checked]
        rows = self._rows_of([group for group, _ in checked])
        labels, num_relabelled = self._labels_of([group for group, _ in checked], rows)
        prompts = [group.prompt_id for group, _ in checked]
        pool_labels = np.zeros_like(labels) if self._config.baseline == "global" else labels
        judged = judge_groups(self._config, rewards, prompts, pool_labels, self._past(step))
        metrics = step_metrics(rewards, judged) | {"groups_relabelled": float(num_relabelled)}
        for prompt, row, values in zip(prompts, rows, rewards, strict=True):
            self._history.add(step, prompt, int(row), values)
        self._last_step = step
        metrics |= self._follow(rows, labels) | self._standing(step)
        ids = [group.group_id for group, _ in checked]
        return Judgement(
            advantages={name: item.advantages for name, item in zip(ids, judged, strict=True)},
            keep={name: item.keep for name, item in zip(ids, judged, strict=True)},
            metrics=metrics | {"seconds": time.perf_counter() - start},
        )

    def state(self) -> bytes:
        """Everything a new worker of the same config needs to go on as this one would."""
        facts = {
            "encoder_sha": self._encoder.sha,
            "texts": self._texts.texts,
            "prompt_ids": self._history.prompt_ids,
            "version": self._version,
            "steps_since_fit": self._steps_since_fit,
            "last_step": self._last_step,
            "tfidf_lift": self._tfidf_lift,
            "num_truncated": self._encoder.num_truncated,
            "notes": self._notes,
        }
        arrays = {f"texts_{name}": value for name, value in self._texts.arrays().items()}
        arrays |= {f"history_{name}": value for name, value in self._history.arrays().items()}
        if self._centroids is not None:
            arrays["centroids"] = self._centroids
        return pack(Snapshot(facts, arrays))

    def restore(self, data: bytes) -> None:
        """Go on from a state. Raises ValueError for bytes that are none, or a state made with another encoder."""
        snapshot = unpack(data)
        facts, arrays = snapshot.facts, snapshot.arrays
        if facts["encoder_sha"] != self._encoder.sha:
            raise ValueError(
                f"grouping state must be of the same encoder, got {facts['encoder_sha'][:12]} for "
                f"{self._encoder.sha[:12]}; keep grouping.encoder as it was, or start a new run"
            )
        self._texts.load(facts["texts"], _part(arrays, "texts_"))
        self._history.load(facts["prompt_ids"], _part(arrays, "history_"))
        self._centroids = arrays.get("centroids")
        self._version, self._steps_since_fit = facts["version"], facts["steps_since_fit"]
        self._last_step, self._tfidf_lift = facts["last_step"], facts["tfidf_lift"]
        self._encoder.num_truncated, self._notes = facts["num_truncated"], list(facts["notes"])

    def map(self) -> dict[str, Any]:
        """For the report: the known texts on their two principal axes, with labels, cluster version and notes."""
        rows = np.arange(len(self._texts))
        if len(rows) > MAX_MAP_POINTS:
            rows = np.unique(np.linspace(0, len(rows) - 1, MAX_MAP_POINTS).astype(np.int64))
        points = principal_axes(self._texts.vectors(rows))
        return {
            "x": points[:, 0].tolist(),
            "y": points[:, 1].tolist(),
            "label": self._texts.labels[rows].tolist(),
            "text": [self._texts.texts[row] for row in rows],
            "cluster_version": self._version,
            "notes": list(self._notes),
        }

    def _rows_of(self, groups: list[ScoredGroup]) -> np.ndarray:
        """Rows of the groups' texts; a text that another worker labelled, and this one never saw, is labelled now."""
        num_known = len(self._texts)
        rows = self._texts.rows([group.text for group in groups])
        if len(self._texts) > num_known:
            self._relabel(np.arange(num_known, len(self._texts)))
        return rows

    def _labels_of(self, groups: list[ScoredGroup], rows: np.ndarray) -> tuple[np.ndarray, int]:
        """Labels [P] under the current clusters, and how many differ from those given before rollout.

        A label of an older version is replaced by the text's current one: both depend on the prompt and the past only.
        """
        current = self._texts.labels[rows].copy()
        given = np.array([group.cluster for group in groups], dtype=np.int64)
        same = np.array([group.cluster_version == self._version for group in groups])
        num_clusters = len(self._fitted())
        for group in groups:
            if group.cluster_version == self._version and not SET_ASIDE <= group.cluster < num_clusters:
                raise ValueError(
                    f"cluster must be -1 to {num_clusters - 1}, got {group.cluster} (group {group.group_id})"
                )
        labels = np.where(same, given, current)
        return labels, int(np.sum(labels != given))

    def _past(self, step: int) -> dict[int, Pool]:
        """Pools of the steps before `step`, by the label the baseline goes by."""
        if self._config.baseline == "global":
            return self._history.pools(step, np.zeros(len(self._history), dtype=np.int64))
        return self._history.pools(step, self._texts.labels[self._history.text_rows])

    def _follow(self, rows: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Move the centroids towards this step's prompts, refit when due; how well they fit, the churn of a refit."""
        rows, first = np.unique(rows, return_index=True)
        vectors, labels = self._texts.vectors(rows), labels[first]
        metrics = {"mean_cosine": mean_cosine(vectors, labels, self._fitted())}
        self._centroids = drifted(self._fitted(), vectors, labels, self._config.ema)
        self._steps_since_fit += 1
        if self._steps_since_fit >= self._config.recompute_every:
            before = self._texts.labels.copy()
            self._version += 1
            self._fit()
            metrics["label_churn"] = label_churn(before, self._texts.labels)
        return metrics

    def _standing(self, step: int) -> dict[str, float]:
        """Where clusters and history stand after this step."""
        sizes = cluster_sizes(self._texts.labels, len(self._fitted()))
        text_labels = self._texts.labels[self._history.text_rows]
        everyone = self._history.pools(step, np.zeros_like(text_labels))
        filled = sizes[sizes > 0]
        return {
            "num_clusters": float(len(filled)),
            "cluster_size_min": float(filled.min(initial=len(self._texts))),
            "cluster_size_max": float(sizes.max()),
            "texts_known": float(len(self._texts)),
            "texts_set_aside": float(np.sum(self._texts.labels == SET_ASIDE)),
            "texts_truncated": float(self._encoder.num_truncated),
            "cluster_version": float(self._version),
            "recomputes": float(self._version),
            "tfidf_lift": self._tfidf_lift,
            **reward_spread(self._history.pools(step, text_labels), everyone.get(0)),
        }

    def _fit(self) -> None:
        """New clusters from the known texts, numbered like the old ones where they share most texts."""
        before = self._texts.labels.copy()
        vectors = self._texts.vectors()
        config = self._config
        # Each fit has its own seed, so that one bad start does not stay for the whole run.
        seed = self._seed + self._version
        fit = fit_centroids(vectors, config.num_clusters, seed, config.max_points_per_centroid, config.device)
        order = order_like(before, assign(vectors, fit.centroids), len(fit.centroids))
        self._centroids = fit.centroids[order]
        self._texts.labels[:] = assign(vectors, self._centroids)
        self._steps_since_fit = 0
        self._tfidf_lift = tfidf_lift(self._texts.texts, self._texts.labels)
        aside = [self._texts.texts[row] for row in np.flatnonzero(self._texts.labels == SET_ASIDE)]
        notes = list(fit.notes)
        if aside:
            notes.append(f"{len(aside)} text(s) set aside, without a usable vector: {', '.join(map(repr, aside[:5]))}")
        for note in notes:
            if note not in self._notes:
                self._notes.append(note)
                logger.warning("grouping: %s", note)

    def _relabel(self, rows: np.ndarray) -> np.ndarray:
        labels = assign(self._texts.vectors(rows), self._fitted())
        self._texts.labels[rows] = labels
        return labels

    def _fitted(self) -> np.ndarray:
        if self._centroids is None:
            raise RuntimeError("clusters must be fitted or restored before use; call fit(texts) first")
        return self._centroids


def _part(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}
