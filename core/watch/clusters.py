"""Checks of the grouping: whether its clusters still mean anything. Only where the baseline goes by them."""

from core.watch.finding import Finding, cures_of
from core.watch.history import WINDOW, History

# 0 is what random labels have, whatever the texts. It is measured at every refit; the laptop run stays within 7 %.
LIFT_LEFT = 0.5
# Share of the difficulty that clusters explain. Windows of the laptop run vary by a factor of two: so a quarter, twice.
ICC_LEFT = 0.25
MIN_ICC_THEN = 0.15
# Even clusters hold 1/K each; one with half of everything is the global baseline under another name.
MAX_LARGEST = 0.5
MIN_CLUSTERS = 4
# Of refits; the laptop run has 0.22 to 0.28, and labels drawn anew with 8 clusters about 0.7.
MAX_CHURN = 0.5


def topics_fading(run: History) -> Finding | None:
    """The texts of a cluster are no longer alike (TF-IDF lift): there are more topics than clusters."""
    lifts = run.series("tfidf_lift")
    if run.config.grouping.baseline != "semantic" or not lifts or lifts[-1] >= LIFT_LEFT * max(lifts):
        return None
    return Finding(
        "topics_fading",
        "warning",
        f"the texts of a cluster are less alike than they were: TF-IDF lift {max(lifts):.2f} -> {lifts[-1]:.2f}",
        cures_of(
            run.config,
            grouping__num_clusters=2 * run.config.grouping.num_clusters,
            grouping__recompute_every=max(1, run.config.grouping.recompute_every // 2),
        ),
    )


def difficulty_unexplained(run: History) -> Finding | None:
    """Prompts of a cluster no longer have a difficulty in common: its baseline adds noise."""
    windows = [value for ago in range(len(run.steps) // WINDOW) if (value := run.recent("icc", ago)) is not None]
    if run.config.grouping.baseline != "semantic" or len(windows) < 3:
        return None
    best, now = max(windows[2:]), max(windows[:2])
    if best < MIN_ICC_THEN or now >= ICC_LEFT * best:
        return None
    inside, everyone = run.last("tau2"), run.last("tau2_global")
    seen = f"clusters explain {now:.0%} of the prompts' difficulty, {best:.0%} earlier"
    if inside is not None and everyone is not None:
        seen += f" (tau squared {inside:.3f} inside them, {everyone:.3f} over all)"
    return Finding(
        "difficulty_unexplained",
        "warning",
        seen,
        cures_of(
            run.config,
            grouping__recompute_every=max(1, run.config.grouping.recompute_every // 2),
            grouping__max_shrinkage=run.config.grouping.max_shrinkage / 2,
            grouping__baseline="global",
        ),
    )


def clusters_lopsided(run: History) -> Finding | None:
    """One cluster holds half of all prompts: the others hardly count."""
    largest, known, num_clusters = (run.recent(key) for key in ("cluster_size_max", "texts_known", "num_clusters"))
    if run.config.grouping.baseline != "semantic" or largest is None or not known or num_clusters is None:
        return None
    if num_clusters < MIN_CLUSTERS or largest < MAX_LARGEST * known:
        return None
    return Finding(
        "clusters_lopsided",
        "warning",
        f"one of {num_clusters:.0f} clusters holds {largest / known:.0%} of the {known:.0f} prompts met so far",
        cures_of(
            run.config,
            grouping__recompute_every=max(1, run.config.grouping.recompute_every // 2),
            grouping__num_clusters=2 * run.config.grouping.num_clusters,
            grouping__baseline="global",
        ),
    )


def labels_churning(run: History) -> Finding | None:
    """Each refit puts most prompts elsewhere, so that what was learned of a cluster is of other prompts."""
    churn = run.series("label_churn")[-2:]
    if run.config.grouping.baseline != "semantic" or len(churn) < 2 or min(churn) < MAX_CHURN:
        return None
    grouping = run.config.grouping
    return Finding(
        "labels_churning",
        "warning",
        f"the last two refits moved {churn[0]:.0%} and {churn[1]:.0%} of the prompts to another cluster",
        cures_of(
            run.config,
            grouping__num_clusters=max(2, grouping.num_clusters // 2),
            grouping__recompute_every=2 * grouping.recompute_every,
        ),
    )
