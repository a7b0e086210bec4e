"""report.html of a run: one self-contained page, made from the run folder alone.

`python -m evaluation.report RUN_DIR` writes it and prints its path; exit status 2 and one sentence where it cannot.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core.console import duration, finite
from core.errors import RunBroken, UserError
from evaluation.report_page import page_of
from evaluation.report_plots import plots_of
from evaluation.report_run import RunRecord, read_run

REPORT = "report.html"
Card = tuple[str, str, str]  # what, value, remark


def write_report(run_dir: Path) -> Path:
    """The path of RUN_DIR/report.html, replaced whole.

    Raises UserError for a folder without a run, RunBroken for broken metrics.
    """
    run = read_run(run_dir)
    plots, missing = plots_of(run)
    page = page_of(run, cards_of(run), plots, missing)
    path, temporary = run_dir / REPORT, run_dir / f".{REPORT}.tmp"
    temporary.write_bytes(page.encode("utf-8", "replace"))  # a model may write half a surrogate pair
    os.replace(temporary, path)
    return path


def cards_of(run: RunRecord) -> list[Card]:
    """The key numbers of the head: of summary.json, or of the steps where there is none."""
    return [card for card in (*_result_cards(run), *_speed_cards(run), *_health_cards(run)) if card[1]]


def _result_cards(run: RunRecord) -> list[Card]:
    _, accuracies = run.accuracies()
    before, after = (accuracies[0], accuracies[-1]) if accuracies else (None, None)
    gain = f"{after - before:+.3f} absolute" if before is not None and after is not None and len(accuracies) > 1 else ""
    rewards = run.series("reward_mean")[1]
    recent = rewards[-10:]
    span = f"mean of the last {len(recent)}; the first was {rewards[0]:.3f}" if len(rewards) > 1 else ""
    planned = finite(run.config.get("num_steps"))
    return [
        ("Held-out accuracy", " → ".join(f"{a:.3f}" for a in dict.fromkeys((before, after)) if a is not None), gain),
        ("Reward", f"{statistics.mean(recent):.3f}" if recent else "", span),
        ("Steps", f"{len(run.metrics):,}", f"of {planned:,.0f} planned" if planned else ""),
    ]


def _speed_cards(run: RunRecord) -> list[Card]:
    seconds = run.series("seconds")[1]
    total = f"{duration(sum(seconds))} in all" if seconds else ""
    samples = _figure(run, "samples_trained", ",.0f")
    trained, dropped = (_figure(run, key, ",.0f", sum) for key in ("groups_trained", "groups_dropped"))
    groups = f"{trained} groups" + (f", {dropped} dropped" if dropped else "") if trained else ""
    return [
        ("Seconds a step", _figure(run, "seconds_per_step_median", ".1f", statistics.median, "seconds"), total),
        ("Rollout tokens/s", _figure(run, "rollout_tokens_per_s", ",.0f"), "median"),
        ("Learner tokens/s", _figure(run, "learner_tokens_per_s", ",.0f"), "median"),
        ("Samples trained", samples, groups) if samples else ("Groups trained", trained, ""),
    ]


def _health_cards(run: RunRecord) -> list[Card]:
    pause = _figure(run, "weight_update_pause_s_median", ".2f", statistics.median, "weight_update_pause_s")
    refits = _figure(run, "recomputes", ",.0f", max)
    return [
        ("Sampler mismatch", _figure(run, "mean_abs_logprob_difference", ".4f"), "mean |log-prob difference|"),
        ("Pause for new weights", f"{pause} s" if pause else "", "median"),
        (
            "Clusters",
            _figure(run, "num_clusters", ",.0f", lambda values: values[-1]),
            f"{refits} refit{'' if refits == '1' else 's'}" if refits else "",
        ),
        _memory_card(run),
    ]


def _memory_card(run: RunRecord) -> Card:
    peaks = run.summary.get("peak_memory_bytes")
    numbers = (
        {name: peak for name, value in peaks.items() if (peak := finite(value))} if isinstance(peaks, dict) else {}
    )
    if not numbers:
        return "Peak memory", "", ""
    largest = max(numbers, key=lambda name: numbers[name])
    return "Peak memory", f"{sum(numbers.values()) / 2**30:.1f} GiB", f"{largest}: {numbers[largest] / 2**30:.1f} GiB"


def _figure(
    run: RunRecord,
    key: str,
    form: str,
    of_steps: Callable[[list[float]], float] = statistics.median,
    step_key: str = "",
) -> str:
    """The summary's number, or what `of_steps` makes of the steps' values; empty where neither is there."""
    value = finite(run.summary.get(key))
    values = run.series(step_key or key)[1]
    if value is None and values:
        value = of_steps(values)
    return "" if value is None else format(value, form)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m evaluation.report", description="Writes RUN_DIR/report.html.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a run, finished or not")
    try:
        print(write_report(parser.parse_args(arguments).run_dir))
    except (UserError, RunBroken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: report could not be written: {error.strerror} ({error.filename})", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
