"""The map of the clusters: prompts on two axes of their embeddings, coloured by label, as plotly's own JSON."""

import html
import textwrap
from typing import Any

from core.console import finite

MAP_LAYOUT: dict[str, Any] = {
    "xaxis": {"title": {"text": "first principal axis"}, "showticklabels": False, "zeroline": False},
    "yaxis": {"title": {"text": "second principal axis"}, "showticklabels": False, "zeroline": False},
    "hovermode": "closest",
}
_NUM_COLORS = 8
_SYMBOLS = ("circle", "diamond", "square", "x", "triangle-up", "cross")  # with more labels than colours
_MAX_HOVER = 400  # characters of a prompt

Point = tuple[float, float, int, str]  # x, y, label, text


def clouds_of(clusters: dict[str, Any]) -> list[dict[str, Any]]:
    """One trace a label, of the columns x, y, label and text; points that are not finite are left out."""
    points = _points(clusters)
    labels = sorted({label for _, _, label, _ in points})
    return [_cloud(label, [point for point in points if point[2] == label]) for label in labels]


def _points(clusters: dict[str, Any]) -> list[Point]:
    columns = (clusters.get(key) for key in ("x", "y", "label", "text"))
    points = []
    for x, y, label, text in zip(*(item if isinstance(item, list) else [] for item in columns), strict=False):
        numbers = [number for value in (x, y, label) if (number := finite(value)) is not None]
        if len(numbers) == 3:
            points.append((numbers[0], numbers[1], int(numbers[2]), str(text)))
    return points


def _cloud(label: int, points: list[Point]) -> dict[str, Any]:
    name = f"cluster {label}" if label >= 0 else "no cluster"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _, _, _ in points],
        "y": [y for _, y, _, _ in points],
        "text": [_hover(text) for _, _, _, text in points],
        "name": f"{name} ({len(points)})",
        "hovertemplate": f"%{{text}}<extra>{name}</extra>",
        "marker": {
            "color": f"--c{label % _NUM_COLORS + 1}" if label >= 0 else "--muted",
            "symbol": _SYMBOLS[max(0, label) // _NUM_COLORS % len(_SYMBOLS)],
            "size": 8,
            "opacity": 0.8,
        },
    }


def _hover(text: str) -> str:
    """Plotly reads a few HTML tags in hover texts: the prompt's own are escaped, and long lines are broken."""
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text[:_MAX_HOVER], 60)) or "(empty)"
