import pickle
import zlib

import numpy as np
import pytest

from core.config import GroupingConfig
from grouping.embeddings import Encoder
from grouping.judgement import Judgement, ScoredGroup
from grouping.worker import GroupingWorker

pytestmark = pytest.mark.fast


class WordEncoder:
    """A stand-in of width 16: each word is a fixed direction, numbers are small noise. Counts what it is asked."""

    def __init__(self) -> None:
        self.sha, self.width, self.num_truncated, self.num_encoded = "words", 16, 0, 0

    def encode(self, texts: list[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        return np.array([sum((self._word(word) for word in text.split()), np.zeros(16)) for text in texts], np.float32)

    def _word(self, word: str) -> np.ndarray:
        size = 0.3 if word.isdigit() else 1.0
        return size * np.random.default_rng(zlib.crc32(word.encode())).standard_normal(16)


TEXTS = [f"{topic} {i}" for i in range(60) for topic in ("add", "take away", "prove", "paint")]


def worker(encoder: object = None, seed: int = 0, **fields: object) -> GroupingWorker:
    config = GroupingConfig(**({"num_clusters": 4, "recompute_every": 5} | fields))
    return GroupingWorker(config, seed, encoder or WordEncoder())


def groups_of(grouping: GroupingWorker, step: int, num_samples: int = 4) -> list[ScoredGroup]:
    """12 prompts in turn; `prove` is seldom right, `add` mostly."""
    draw = np.random.default_rng(step)
    texts = [TEXTS[(12 * step + i) % len(TEXTS)] for i in range(12)]
    chance = {"add": 0.9, "take": 0.7, "prove": 0.1, "paint": 0.4}
    return [
        ScoredGroup(
            f"0:{text}:{step}",
            text,
            text,
            cluster,
            (draw.random(num_samples) < chance[text.split()[0]]).astype(np.float64),
            version,
        )
        for text, (cluster, version) in zip(texts, grouping.label(texts), strict=True)
    ]


def turn(grouping: GroupingWorker, steps: range) -> list[Judgement]:
    return [grouping.judge(step, groups_of(grouping, step)) for step in steps]


def same(first: Judgement, second: Judgement) -> bool:
    times = {"seconds": 0.0}
    return (
        {name: values.tobytes() for name, values in first.advantages.items()}
        == {name: values.tobytes() for name, values in second.advantages.items()}
        and first.keep == second.keep
        and first.metrics | times == second.metrics | times
    )


def test_a_step_has_all_its_metrics() -> None:
    grouping = worker()
    grouping.fit(TEXTS)
    *_, last = turn(grouping, range(5))
    assert set(last.metrics) == {
        "reward_mean",
        "advantage_abs_mean",
        "zero_variance_share",
        "groups_dropped_zero_variance",
        "groups_of_one",
        "groups_relabelled",
        "shrinkage_mean",
        "s2",
        "tau2",
        "tau2_global",
        "icc",
        "tfidf_lift",
        "num_clusters",
        "cluster_size_min",
        "cluster_size_max",
        "cluster_version",
        "recomputes",
        "label_churn",
        "mean_cosine",
        "texts_known",
        "texts_set_aside",
        "texts_truncated",
        "seconds",
    }
    assert all(type(value) is float and np.isfinite(value) for value in last.metrics.values())
    assert last.metrics["num_clusters"] == 4.0


def test_clusters_that_follow_difficulty_explain_it() -> None:
    grouping = worker(recompute_every=750)
    grouping.fit(TEXTS)
    last = turn(grouping, range(20))[-1].metrics
    # the topics' chances .9 .7 .1 .4 have variance .1158 (ddof 1); within a topic there is none
    assert last["tau2_global"] == pytest.approx(0.1158, rel=0.35)
    assert last["tau2"] < 0.02
    assert last["icc"] > 0.8
    assert last["shrinkage_mean"] > 0.5


def test_the_first_step_uses_other_prompts_and_later_ones_the_past() -> None:
    grouping = worker()
    grouping.fit(TEXTS)
    turn(grouping, range(1))
    cluster, version = grouping.label(["add 3"])[0]
    one = ScoredGroup("0:x:0", "x", "add 3", cluster, np.array([1.0]), version)
    past = [group.rewards.mean() for group in groups_of(grouping, 0) if group.cluster == cluster]
    assert grouping.judge(1, [one]).advantages["0:x:0"][0] == pytest.approx(1.0 - np.mean(past))


def test_a_global_baseline_pools_every_prompt() -> None:
    grouping = worker(baseline="global")
    grouping.fit(TEXTS)
    turn(grouping, range(1))
    cluster, version = grouping.label(["add 3"])[0]
    one = ScoredGroup("0:x:0", "x", "add 3", cluster, np.array([1.0]), version)
    past = [group.rewards.mean() for group in groups_of(grouping, 0)]
    assert grouping.judge(1, [one]).advantages["0:x:0"][0] == pytest.approx(1.0 - np.mean(past))


def test_own_rewards_of_a_step_never_reach_its_baseline() -> None:
    """Two workers with the same past; one group's rewards differ: no other group with a past is touched."""
    judged = []
    for flip in (False, True):
        grouping = worker()
        grouping.fit(TEXTS)
        turn(grouping, range(3))
        groups = groups_of(grouping, 3)
        if flip:
            groups[0] = ScoredGroup(**(vars(groups[0]) | {"rewards": 1.0 - groups[0].rewards}))
        judged.append(grouping.judge(3, groups).advantages)
    differ = [name for name in judged[0] if judged[0][name].tobytes() != judged[1][name].tobytes()]
    assert differ == [groups[0].group_id]


def test_refits_change_labels_keep_numbers_and_are_counted() -> None:
    grouping = worker(num_clusters=8)
    grouping.fit(TEXTS[:40])
    metrics = [judgement.metrics for judgement in turn(grouping, range(20))]
    churn = [entry["label_churn"] for entry in metrics if "label_churn" in entry]
    assert [step for step, entry in enumerate(metrics) if "label_churn" in entry] == [4, 9, 14, 19]
    assert metrics[-1]["recomputes"] == metrics[-1]["cluster_version"] == 4.0
    assert 0.0 < max(churn) < 0.9
    assert grouping.label(["add 3"])[0][1] == 4


def test_a_label_of_an_older_version_is_replaced_and_counted() -> None:
    grouping = worker(num_clusters=8, recompute_every=1)
    grouping.fit(TEXTS[:40])
    groups = groups_of(grouping, 1)
    turn(grouping, range(1))  # refits
    now = grouping.label([group.text for group in groups])
    changed = sum(group.cluster != cluster for group, (cluster, _) in zip(groups, now, strict=True))
    assert grouping.judge(1, groups).metrics["groups_relabelled"] == changed > 0


def test_neither_arrival_order_nor_a_second_run_change_a_bit() -> None:
    runs = []
    for reverse in (False, False, True):
        grouping = worker()
        grouping.fit(TEXTS[::-1] if reverse else TEXTS)
        runs.append([])
        for step in range(7):
            groups = groups_of(grouping, step)
            runs[-1].append(grouping.judge(step, groups[::-1] if reverse else groups))
    for other in runs[1:]:
        assert all(same(a, b) for a, b in zip(runs[0], other, strict=True))


def test_a_restored_worker_goes_on_bit_for_bit() -> None:
    first = worker(num_clusters=8)
    first.fit(TEXTS[:40])
    turn(first, range(8))
    stored = first.state()
    encoder = WordEncoder()
    second = worker(encoder, num_clusters=8)
    second.restore(stored)
    assert second.state() == stored
    for step in range(8, 18):  # new texts, drift and two refits
        assert same(first.judge(step, groups_of(first, step)), second.judge(step, groups_of(second, step)))
    assert first.state() == second.state()
    assert encoder.num_encoded == len(second.map()["text"]) - 96  # 8 steps of 12 texts came with the state


def test_a_state_of_512_prompts_is_small() -> None:
    class Wide(WordEncoder):
        def __init__(self) -> None:
            super().__init__()
            self.width = 384

        def encode(self, texts: list[str]) -> np.ndarray:
            return np.random.default_rng(len(texts)).standard_normal((len(texts), 384)).astype(np.float32)

    grouping = worker(Wide())
    grouping.fit([f"What is {i} + {i}? Answer with one number only, please." for i in range(156)])
    labels = grouping.label([f"prompt {i}" for i in range(512)])
    groups = [
        ScoredGroup(f"0:{i}:0", str(i), f"prompt {i}", cluster, np.ones(4), version)
        for i, (cluster, version) in enumerate(labels)
    ]
    grouping.judge(0, groups)
    assert len(grouping.state()) < 1_000_000


def test_a_state_that_does_not_fit_is_refused() -> None:
    grouping = worker()
    grouping.fit(TEXTS)
    other = WordEncoder()
    other.sha = "other"
    with pytest.raises(ValueError, match="same encoder, got words for other"):
        worker(other).restore(grouping.state())
    for data in (b"", b"nonsense", grouping.state()[:500], pickle.dumps({"format": 1})):
        with pytest.raises(ValueError, match="grouping state must be"):
            worker().restore(data)


def test_use_out_of_turn_is_refused() -> None:
    grouping = worker()
    with pytest.raises(RuntimeError, match=r"call fit\(texts\) first"):
        grouping.label(["add 1"])
    grouping.fit(TEXTS)
    with pytest.raises(RuntimeError, match="fitted already"):
        grouping.fit(TEXTS)
    groups = groups_of(grouping, 0)
    grouping.judge(0, groups)
    with pytest.raises(ValueError, match=r"later than the last judged \(0\), got 0"):
        grouping.judge(0, groups)
    wrong = ScoredGroup(**(vars(groups[0]) | {"cluster": 9}))
    with pytest.raises(ValueError, match=r"cluster must be -1 to 3, got 9"):
        grouping.judge(1, [wrong])


def test_a_refused_step_leaves_no_trace() -> None:
    grouping = worker()
    grouping.fit(TEXTS)
    turn(grouping, range(2))
    groups = groups_of(grouping, 2)
    before = grouping.state()
    with pytest.raises(ValueError, match="finite"):
        grouping.judge(2, [*groups, ScoredGroup("0:bad:0", "bad", groups[0].text, 0, np.array([np.nan]))])
    assert grouping.state() == before


def test_blank_texts_are_set_aside_and_named() -> None:
    grouping, without = worker(num_clusters=2), worker(num_clusters=2)
    grouping.fit([*TEXTS[:30], "", " "])
    without.fit(TEXTS[:30])
    assert grouping.label(["", " "]) == [(-1, 0), (-1, 0)]
    assert grouping.label(TEXTS[:30]) == without.label(TEXTS[:30])
    assert grouping.map()["notes"] == ["2 text(s) set aside, without a usable vector: '', ' '"]
    with pytest.raises(ValueError, match="at least one usable row"):
        worker().fit(["", " "])
    with pytest.raises(ValueError, match="at least one usable row"):
        worker().fit([])


def test_fewer_texts_than_clusters_is_noted() -> None:
    grouping = worker(num_clusters=8)
    grouping.fit(TEXTS[:3])
    assert grouping.map()["notes"] == ["8 clusters asked for, 3 made: there are only 3 different texts"]
    assert len({cluster for cluster, _ in grouping.label(TEXTS[:3])}) == 3


def test_the_first_fit_encodes_a_bounded_sample_and_no_text_twice() -> None:
    encoder = WordEncoder()
    grouping = worker(encoder, num_clusters=2)
    grouping.fit(TEXTS * 2)
    assert encoder.num_encoded == 2 * 39
    grouping.label(TEXTS)
    grouping.label(TEXTS)
    assert encoder.num_encoded == len(TEXTS)


def test_a_text_never_labelled_here_is_judged_all_the_same() -> None:
    grouping = worker()
    grouping.fit(TEXTS[:20])
    judged = grouping.judge(0, [ScoredGroup("0:n:0", "n", "prove 999", 0, np.array([1.0, 0.0]))])
    assert judged.advantages["0:n:0"].tolist() == [1.0, -1.0]
    assert grouping.map()["text"][-1] == "prove 999"


def test_the_map_is_capped() -> None:
    grouping = worker(num_clusters=2)
    grouping.fit(TEXTS[:5])
    grouping.label([f"add {i}" for i in range(3000)])
    points = grouping.map()
    assert {len(points[name]) for name in ("x", "y", "label", "text")} == {1000}


def test_arithmetic_prompts_get_four_clusters_a_refit_moves_some_and_a_restored_worker_agrees(minilm: Encoder) -> None:
    forms = (
        "What is {} + {}?",
        "Compute {} minus {}.",
        "Add {} and {}.",
        "Take {} from {}.",
        "{} - {} =",
        "Sum of {}, {}?",
    )
    texts = [forms[i % 6].format(i % 21, (7 * i) % 20) for i in range(192)]
    config = GroupingConfig(num_clusters=8, recompute_every=4, max_points_per_centroid=12)
    grouping = GroupingWorker(config, 0, minilm)
    grouping.fit(texts)
    churn, restored = [], GroupingWorker(config, 0, minilm)
    for step in range(8):
        if step == 5:
            restored.restore(grouping.state())
        batch = texts[16 * step : 16 * step + 16]
        labels = grouping.label(batch)
        scored = [
            ScoredGroup(f"0:{i}:0", text, text, cluster, np.array([i % 2, 1.0, 0.0]), version)
            for i, (text, (cluster, version)) in enumerate(zip(batch, labels, strict=True))
        ]
        judged = grouping.judge(step, scored)
        if step >= 5:
            assert restored.label(batch) == labels
            assert same(restored.judge(step, scored), judged)
        metrics = judged.metrics
        churn.append(metrics.get("label_churn", 0.0))
    assert metrics["num_clusters"] >= 4
    assert metrics["tfidf_lift"] > 0.2
    assert max(churn) > 0.0
