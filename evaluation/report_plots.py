"""The report's plots, as plotly's own JSON: built from a RunRecord, drawn by the page.

Colours are names of the page's CSS variables ("--c1"), so that one figure serves the light and the dark page.
"""

from dataclasses import dataclass
from typing import Any

from core.console import finite
from evaluation.report_map import MAP_LAYOUT, clouds_of
from evaluation.report_run import RunRecord, interval_of, thinned

_MAX_POINTS = 2000  # of a line: more cannot be seen on a screen
_MAX_BARS = 200  # steps drawn as bars; more are drawn as areas
_FEW = 40  # points that are marked one by one
_SMOOTHED = 10  # steps in the running mean of the reward
_PANELS = {1: ((0.0, 1.0),), 2: ((0.56, 1.0), (0.0, 0.44))}  # share of the height, the upper one first
_PHASES = (
    ("rollout_s", "rollout"),
    ("reward_s", "reward"),
    ("grouping_s", "grouping"),
    ("learner_s", "learner"),
    ("weights_s", "weights"),
)


@dataclass(frozen=True)
class Plot:
    name: str  # an id in the page
    title: str
    caption: str  # how to read it
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    wide: bool = False  # over the page's whole width
    height: int = 280  # pixels


@dataclass(frozen=True)
class Line:
    key: str  # of metrics.jsonl
    label: str
    panel: int = 0


@dataclass(frozen=True)
class LinePlot:
    """A plot of metrics over steps, in one or two panels one above the other."""

    name: str
    title: str
    caption: str
    axes: tuple[str, ...]  # a title a panel
    lines: tuple[Line, ...]
    refits: bool = False  # mark the steps where clusters were fitted again


_LINE_PLOTS = (
    LinePlot(
        "entropy",
        "Entropy",
        "Of the policy's next-token distribution. Near 0, all samples are alike.",
        ("nats a token",),
        (Line("entropy", "entropy"),),
    ),
    LinePlot(
        "mismatch",
        "Sampler mismatch",
        "How far the learner's log-probs are from those that drew the tokens; the share of importance weights cut.",
        ("|difference|", "share cut"),
        (Line("mean_abs_logprob_difference", "mean difference"), Line("importance_truncated_share", "share cut", 1)),
    ),
    LinePlot(
        "staleness",
        "Staleness",
        "Weight updates between the sampling of a token and its training.",
        ("weight updates",),
        (Line("staleness_mean", "mean"), Line("staleness_max", "largest")),
    ),
    LinePlot(
        "length",
        "Answer length",
        "Truncated answers ran into the limit of new tokens.",
        ("tokens an answer", "share"),
        (Line("answer_tokens_mean", "mean length"), Line("truncated_share", "truncated", 1)),
    ),
    LinePlot(
        "speed",
        "Speed",
        "Sampled and trained tokens a second.",
        ("tokens/s",),
        (Line("rollout_tokens_per_s", "rollout"), Line("learner_tokens_per_s", "learner")),
    ),
    LinePlot(
        "clusters",
        "What the clusters explain",
        "ICC: the share of the spread of difficulty (τ²) that clusters take away. TF-IDF lift: how much more alike "
        "texts are inside a cluster than at random. Dotted: a refit.",
        ("share", "τ² inside clusters"),
        (Line("icc", "ICC"), Line("tfidf_lift", "TF-IDF lift"), Line("tau2", "τ²", 1)),
        refits=True,
    ),
    LinePlot(
        "signal",
        "Signal in the groups",
        "A group whose answers all got the same reward teaches nothing against its own mean.",
        ("share",),
        (Line("zero_variance_share", "groups without variance"), Line("distinct_share", "different answers")),
    ),
    LinePlot("gradient", "Gradient", "Norm before clipping.", ("norm",), (Line("grad_norm", "gradient norm"),)),
)


def plots_of(run: RunRecord) -> tuple[list[Plot], list[str]]:
    """The plots with something to draw, and the titles of those without."""
    run = RunRecord(**{**vars(run), "metrics": thinned(run.metrics, _MAX_POINTS)})
    every = [_learning(run), *(_lines(run, plot) for plot in _LINE_PLOTS), _seconds(run), _cluster_map(run)]
    return [plot for plot in every if plot.data], [plot.title for plot in every if not plot.data]


def _learning(run: RunRecord) -> Plot:
    steps, rewards = run.series("reward_mean")
    at, accuracies = run.accuracies()
    one_scale = all(-0.01 <= value <= 1.01 for value in rewards) or not accuracies
    lower = "y" if one_scale else "y2"
    data: list[dict[str, Any]] = []
    if rewards:
        smooth = len(rewards) >= 2 * _SMOOTHED
        raw = _trace(steps, rewards, "reward mean of a step", "--c1", mode="lines" if smooth else "")
        data.append({**raw, "opacity": 0.4, "line": {"color": "--c1", "width": 1}} if smooth else raw)
        if smooth:
            data.append(
                _trace(steps, _running_mean(rewards), f"reward mean of {_SMOOTHED} steps", "--c1", mode="lines")
            )
    if accuracies:
        data += [{**trace, "yaxis": lower} for trace in _band(run)]
        curve = _trace(at, accuracies, "held-out accuracy", "--c2", mode="lines+markers")
        data.append({**curve, "marker": {"size": 8, "color": "--c2"}, "yaxis": lower})
    titles = ["reward, accuracy" if accuracies else "reward"] if one_scale else ["reward", "accuracy"]
    layout = _layout(run, titles)
    if one_scale and accuracies:
        layout["yaxis"]["range"] = [-0.02, 1.02]
    caption = (
        "Mean reward of the sampled answers, and accuracy of greedy answers to held-out prompts with its 95% interval."
    )
    return Plot("learning", "Reward and held-out accuracy", caption, data, layout, wide=True, height=340)


def _band(run: RunRecord) -> list[dict[str, Any]]:
    """Two lines without ink, the area between them filled: the accuracy's 95% interval."""
    known = [(row["step"], band) for row in run.evaluations if (band := interval_of(row)) is not None]
    steps = [step for step, _ in known]
    edge = {"type": "scatter", "mode": "lines", "x": steps, "line": {"width": 0}, "hoverinfo": "skip"}
    if not known:
        return []
    return [
        {**edge, "y": [low for _, (low, _) in known], "showlegend": False},
        {
            **edge,
            "y": [high for _, (_, high) in known],
            "name": "95% interval",
            "fill": "tonexty",
            "fillcolor": "--c2-band",
        },
    ]


def _lines(run: RunRecord, plot: LinePlot) -> Plot:
    present = [(line, *run.series(line.key)) for line in plot.lines]
    present = [item for item in present if item[1]]
    panels = sorted({line.panel for line, _, _ in present})  # a panel without a line is not drawn
    data = [
        {**_trace(steps, values, line.label, f"--c{k + 1}"), "yaxis": "y2" if panels.index(line.panel) else "y"}
        for k, (line, steps, values) in enumerate(present)
    ]
    layout = _layout(run, [plot.axes[panel] for panel in panels])
    if plot.refits:
        dotted = {"color": "--muted", "width": 1, "dash": "dot"}
        place = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "line": dotted}
        layout["shapes"] = [{**place, "x0": step, "x1": step} for step in _refit_steps(run)]
    return Plot(plot.name, plot.title, plot.caption, data, layout)


def _seconds(run: RunRecord) -> Plot:
    as_bars = len(run.metrics) <= _MAX_BARS
    data: list[dict[str, Any]] = []
    for k, (key, label) in enumerate(_PHASES):
        steps, values = run.series(key)
        color = f"--c{k + 1}"
        if not steps:
            continue
        if as_bars:
            data.append({"type": "bar", "x": steps, "y": values, "name": label, "marker": {"color": color}})
        else:
            area = {"stackgroup": "phases", "fillcolor": color, "line": {"width": 0}}
            data.append({**_trace(steps, values, label, color, mode="lines"), **area})
    steps, values = run.series("seconds")
    if steps:
        data.append(_trace(steps, values, "whole step", "--ink"))
    caption = "Where a step's time goes. Phases that run side by side add up to more than the whole step."
    layout = {**_layout(run, ["seconds a step"]), "barmode": "stack", "bargap": 0.1}
    layout["legend"] = {"traceorder": "normal"}
    return Plot("seconds", "Seconds a step", caption, data, layout, wide=True)


def _cluster_map(run: RunRecord) -> Plot:
    caption = "Prompts by the meaning of their words, in two of the embedding's dimensions; hover to read a prompt."
    version = finite(run.clusters.get("cluster_version", run.clusters.get("version")))
    if version is not None:
        caption += f" Clustering version {version:.0f}."
    return Plot("map", "Cluster map", caption, clouds_of(run.clusters), MAP_LAYOUT, wide=True, height=480)


def _trace(steps: list[int], values: list[float], name: str, color: str, mode: str = "") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode or ("lines+markers" if len(steps) <= _FEW else "lines"),
        "x": steps,
        "y": values,
        "name": name,
        "line": {"color": color, "width": 2 if len(steps) <= _MAX_BARS else 1.2},
        "marker": {"color": color, "size": 5},
    }


def _layout(run: RunRecord, titles: list[str]) -> dict[str, Any]:
    """One panel a title, one above the other, over one axis of steps."""
    last_step = max([int(row["step"]) for row in (*run.metrics, *run.evaluations)], default=0)
    xaxis: dict[str, Any] = {"title": {"text": "step"}, "tickformat": "d"}
    if last_step <= 10:
        xaxis["dtick"] = 1  # plotly would mark halves of a step
    if len(titles) > 1:
        xaxis["anchor"] = "y2"
    axes = {
        f"yaxis{k + 1 if k else ''}": {"title": {"text": title}, "domain": list(domain), "rangemode": "tozero"}
        for k, (title, domain) in enumerate(zip(titles, _PANELS[max(1, len(titles))], strict=False))
    }
    return {"xaxis": xaxis, **axes, "hovermode": "x unified"}


def _refit_steps(run: RunRecord) -> list[int]:
    """Steps whose cluster version differs from that of the step before."""
    steps, versions = run.series("cluster_version")
    return [steps[k] for k in range(1, len(steps)) if versions[k] != versions[k - 1]]


def _running_mean(values: list[float]) -> list[float]:
    windows = (values[max(0, k + 1 - _SMOOTHED) : k + 1] for k in range(len(values)))
    return [sum(window) / len(window) for window in windows]
