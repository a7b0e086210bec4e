"""The report's page: HTML around a RunRecord and its plots. Every text of the run is escaped; nothing is loaded.

The page carries a content policy by hash: a browser runs the two scripts below and no other, and opens no connection,
whatever a model wrote into its answers.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any
from unicodedata import category

from plotly.offline import get_plotlyjs

from core.console import finite
from evaluation.report_plots import Plot
from evaluation.report_run import RunRecord, interval_of, thinned

_HERE = Path(__file__).parent
_MAX_TEXT = 2000  # characters of an answer that are shown
_MAX_ROWS = 200  # steps in the table
_STEP_COLUMNS = (
    ("step", "step", "d"),
    ("reward_mean", "reward", ".3f"),
    ("heldout_accuracy", "held-out accuracy", ".3f"),
    ("entropy", "entropy", ".3f"),
    ("staleness_mean", "staleness", ".2f"),
    ("mean_abs_logprob_difference", "mismatch", ".4f"),
    ("answer_tokens_mean", "answer tokens", ".1f"),
    ("truncated_share", "truncated", ".3f"),
    ("rollout_tokens_per_s", "rollout tokens/s", ",.0f"),
    ("learner_tokens_per_s", "learner tokens/s", ",.0f"),
    ("grad_norm", "gradient norm", ".3f"),
    ("seconds", "seconds", ".1f"),
)


def page_of(
    run: RunRecord, cards: Iterable[tuple[str, str, str]], plots: Sequence[Plot], missing: Sequence[str]
) -> str:
    """The whole page; cards are (what, value, remark)."""
    scripts = [get_plotlyjs(), (_HERE / "report.js").read_text(encoding="utf-8")]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    body = "\n".join(
        [_head(run, cards), _plots(plots, missing), _evaluations(run), _answers(run), _steps(run), _folded(run)]
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(run.name)}: training report</title>
<style>
{(_HERE / "report.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{body}
<script type="application/json" id="figures">{_figures(plots)}</script>
<script>{scripts[0]}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _figures(plots: Sequence[Plot]) -> str:
    """JSON that stays inside its script element: no < can end it."""
    figures = [{"name": p.name, "wide": p.wide, "data": p.data, "layout": p.layout} for p in plots]
    return json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _head(run: RunRecord, cards: Iterable[tuple[str, str, str]]) -> str:
    notes = [] if run.summary else ["This run has no summary.json: it is still going or ended early."]
    return "\n".join(
        [
            f"<header><h1>{escape(run.name)}</h1>",
            f'<p class="muted">{escape(_subtitle(run))}</p>',
            *(f'<p class="note">{escape(note)}</p>' for note in [*notes, *run.notes]),
            '</header><section class="cards">',
            *(
                f'<div class="card"><span>{escape(w)}</span><b>{escape(v)}</b><span>{escape(r)}</span></div>'
                for w, v, r in cards
            ),
            "</section>",
        ]
    )


def _subtitle(run: RunRecord) -> str:
    """The config in a line: the model and the sizes that shape a run."""
    said = (
        ("", "policy.model"),
        ("loss ", "learner.loss"),
        ("baseline ", "grouping.baseline"),
        ("prompts a step ", "prompts_per_step"),
        ("samples a prompt ", "rollout.samples_per_prompt"),
        ("learning rate ", "learner.learning_rate"),
        ("max staleness ", "max_staleness"),
        ("seed ", "seed"),
    )
    found = ((words, _at(run.config, path)) for words, path in said)
    return " · ".join(f"{words}{value}" for words, value in found if value is not None) or "training report"


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _plots(plots: Sequence[Plot], missing: Sequence[str]) -> str:
    figures = [
        f"<figure{' class=wide' if plot.wide else ''}><h3>{escape(plot.title)}</h3>"
        f"<figcaption>{escape(plot.caption)}</figcaption>"
        f'<div id="plot-{plot.name}" style="height: {plot.height}px"></div></figure>'
        for plot in plots
    ]
    absent = f'<p class="muted">Not recorded in this run: {escape(", ".join(missing))}.</p>' if missing else ""
    without = (
        '<noscript><p class="note">The plots need JavaScript; every number of them is in the tables.</p></noscript>'
    )
    return "\n".join(["<h2>Plots</h2>", without, '<section class="plots">', *figures, "</section>", absent])


def _evaluations(run: RunRecord) -> str:
    if not run.evaluations:
        return ""
    rows = []
    for row in thinned(run.evaluations, _MAX_ROWS):
        band = interval_of(row)
        of = " of ".join(_number(row.get(key), ".0f") for key in ("correct", "num_prompts"))
        span = f"{band[0]:.3f} to {band[1]:.3f}" if band else ""
        rows.append([_number(row.get("step"), ".0f"), _number(row.get("accuracy"), ".3f"), of, span])
    return "<h2>Held-out evaluations</h2>" + _table(["step", "accuracy", "correct", "95% interval"], rows)


def _answers(run: RunRecord) -> str:
    """Answers of the first and the last evaluation side by side, one prompt a row."""
    sides = [row for row in run.evaluations if _samples(row)]
    if not sides:
        return ""
    sides = [sides[0], sides[-1]] if len(sides) > 1 else sides
    by_prompt = [{(str(s.get("prompt")), str(s.get("answer"))): s for s in _samples(side)} for side in sides]
    asked = dict.fromkeys(key for side in by_prompt for key in side)
    heads = [f"{when} (step {side['step']})" for when, side in zip(("Before", "After"), sides, strict=False)]
    rows = "\n".join(
        f'<tr><td>{_cut(prompt)}</td><td class="expected">{_cut(answer)}</td>'
        + "".join(f"<td>{_answer(side.get((prompt, answer)))}</td>" for side in by_prompt)
        + "</tr>"
        for prompt, answer in asked
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"""<h2>Answers before and after</h2>
<div class="panel"><table class="answers">
<thead><tr><th>Prompt</th><th class="expected">Expected</th>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>"""


def _samples(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    samples = evaluation.get("samples")
    return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []


def _answer(sample: dict[str, Any] | None) -> str:
    if sample is None:
        return "–"
    marks = {True: '<span class="right">✓ right</span>', False: '<span class="wrong">✗ wrong</span>'}
    correct = sample.get("correct")
    return (marks[correct] if isinstance(correct, bool) else "") + _cut(str(sample.get("text", "")))


def _cut(text: str) -> str:
    """Escaped, at most _MAX_TEXT characters, without the control characters HTML cannot hold."""
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"
    bad = {"Cc", "Cs"}  # control characters, halves of surrogate pairs
    kept = (c if c in "\n\t" or category(c) not in bad else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return escape("".join(kept))


def _steps(run: RunRecord) -> str:
    if not run.metrics:
        return ""
    chosen = thinned(run.metrics, _MAX_ROWS)
    columns = [c for c in _STEP_COLUMNS if any(finite(row.get(c[0])) is not None for row in chosen)]
    rows = [[_number(row.get(key), form) for key, _, form in columns] for row in chosen]
    some = f"{len(chosen)} of {len(run.metrics)}" if len(chosen) < len(run.metrics) else str(len(chosen))
    table = _table([title for _, title, _ in columns], rows)
    return f"<details><summary>Steps ({some})</summary>{table}</details>"


def _folded(run: RunRecord) -> str:
    parts = []
    if run.summary:
        text = escape(json.dumps(run.summary, indent=2, ensure_ascii=False))
        parts.append(f'<details><summary>Summary</summary><div class="panel"><pre>{text}</pre></div></details>')
    if run.config_text:
        text = escape(run.config_text)
        parts.append(f'<details><summary>Configuration</summary><div class="panel"><pre>{text}</pre></div></details>')
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"""<div class="panel"><table class="numbers">
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>"""


def _number(value: Any, form: str) -> str:
    number = finite(value)
    if number is None:
        return "–"
    return format(int(number) if form == "d" else number, form)
