"""From a run or a model to the version that may serve: export, quantise, gate."""

import math
from collections.abc import Callable

from core.errors import DeadlineExceeded, RunBroken, UserError
from serve.artefacts.artefact import Artefact, export_run
from serve.artefacts.quantize import quantize
from serve.config import ServeConfig
from serve.gate.probe import missing_kernel
from serve.gate.tasks import Tasks, heldout_tasks, training_texts
from serve.gate.verdict import Verdict, judge

Say = Callable[[str], None]


def prepare_version(source: str, config: ServeConfig, stable: Artefact | None, say: Say) -> Artefact:
    """The artefact of `source` that may serve: quantised where the gate lets it, else in full precision.

    The full model is judged against `stable`, the version that serves now, where there is one. UserError with the
    gate's reasons where it may not serve at all.
    """
    full = export_run(source, config.serve_dir)
    say(f"exported {source}: version {full.digest[:12]}, {full.size_bytes / 1e6:.0f} MB")
    tasks = heldout_tasks(full, config.gate.num_tasks)
    _admit_full(full, stable, config, tasks, say)
    if not config.quantize.enabled:
        return full
    lacking = missing_kernel() if config.replica.device == "cpu" else None
    if lacking:
        say(f"not quantised: {lacking}")
        return full
    for group_size in config.quantize.group_sizes:
        chosen = _quantised(full, group_size, config, tasks, say)
        if chosen is not None:
            return chosen
    say(f"no group size of {config.quantize.group_sizes} passes the gate: full precision is served")
    return full


def _admit_full(full: Artefact, stable: Artefact | None, config: ServeConfig, tasks: Tasks, say: Say) -> None:
    if stable is not None and stable.digest == full.digest:
        return
    bounds = {"max_relative_loss": config.gate.max_loss_to_stable, "confidence": config.gate.confidence_to_stable}
    loose = config.model_copy(update={"gate": config.gate.model_copy(update=bounds)})
    verdict = judge(stable, full, loose, tasks, say)
    say(f"gate, {full.digest[:12]} against {stable.digest[:12] if stable else 'nothing'}: {words_of(verdict)}")
    if not verdict.passed:
        raise UserError(f"version {full.digest[:12]} must pass the gate to serve, but {'; '.join(verdict.reasons)}")


def _quantised(full: Artefact, group_size: int, config: ServeConfig, tasks: Tasks, say: Say) -> Artefact | None:
    texts = training_texts(full, config.quantize.num_calibration_prompts)
    try:
        made = quantize(full, config.serve_dir, config.quantize, texts, group_size, say)
    except (UserError, RunBroken, DeadlineExceeded) as error:
        say(f"AWQ with groups of {group_size}: {error}")
        return None
    # Each size is another chance to pass by luck: the error probability is shared among them (Bonferroni).
    confidence = 1 - (1 - config.gate.confidence) / len(config.quantize.group_sizes)
    strict = config.model_copy(update={"gate": config.gate.model_copy(update={"confidence": confidence})})
    verdict = judge(full, made, strict, tasks, say)
    say(f"AWQ with groups of {group_size}: {made.size_bytes / 1e6:.0f} MB of {full.size_bytes / 1e6:.0f} MB")
    say(f"gate, AWQ with groups of {group_size} against full precision: {words_of(verdict)}")
    return made if verdict.passed else None


def words_of(verdict: Verdict) -> str:
    """The verdict in a line."""
    parts = ["passed" if verdict.passed else "refused"]
    if verdict.upper_bound is not None and math.isfinite(verdict.upper_bound):
        parts.append(
            f"reward {verdict.candidate_reward:.3f} of {verdict.full_reward:.3f} on {verdict.num_tasks} tasks, "
            f"relative loss {verdict.relative_loss:+.1%}, bounded by {verdict.upper_bound:.1%}"
        )
    if verdict.perplexity_candidate is not None and verdict.perplexity_full is not None:
        parts.append(f"perplexity {verdict.perplexity_candidate:.1f} against {verdict.perplexity_full:.1f}")
    return "; ".join((*parts, *verdict.reasons))
