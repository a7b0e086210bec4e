"""From a run or a model to the version that may serve: export, quantise, gate."""

import math
from collections.abc import Callable
from contextlib import suppress

from core.errors import DeadlineExceeded, RunBroken, UserError
from serve.artefacts.artefact import Artefact, artefacts_folder, load_artefact
from serve.artefacts.export import export_run
from serve.artefacts.quantize import quantization_of, quantize
from serve.config import ServeConfig
from serve.gate.probe import Answers, missing_kernel
from serve.gate.tasks import NO_TASKS, Tasks, heldout_tasks, training_texts
from serve.gate.verdict import Verdict, judge

Say = Callable[[str], None]


def prepare_version(source: str, config: ServeConfig, stable: Artefact, say: Say) -> Artefact:
    """The artefact of `source` that may take over from `stable`: quantised where the gate lets it, else in full.

    UserError with the gate's reasons where it may not serve at all.
    """
    full = _exported(source, config, say)
    tasks, asked = heldout_tasks(full, config.gate.num_tasks), dict[str, Answers]()
    if stable.digest != full.digest:
        bounds = {"max_relative_loss": config.gate.max_loss_to_stable, "confidence": config.gate.confidence_to_stable}
        loose = config.model_copy(update={"gate": config.gate.model_copy(update=bounds)})
        _admit(full, judge(stable, full, loose, tasks, say, asked), f"against {stable.digest[:12]}", say)
    return quantised(full, config, say, tasks, asked) or full


def prepare_first(source: str, config: ServeConfig, say: Say) -> Artefact:
    """The artefact of `source` in full precision, with nothing to compare it with. UserError where it may not serve."""
    full = _exported(source, config, say)
    _admit(full, judge(None, full, config, NO_TASKS, say), "by itself", say)
    return full


def quantised(
    full: Artefact,
    config: ServeConfig,
    say: Say,
    tasks: Tasks | None = None,
    asked: dict[str, Answers] | None = None,
) -> Artefact | None:
    """A version of `full` in 4 bits that passes the gate against it; None, said why, where there is none.

    A group size that was refused before by the same gate is not tried again. `asked`: as serve.gate.verdict.judge says.
    """
    if not config.quantize.enabled:
        return None
    lacking = missing_kernel() if config.replica.device == "cpu" else None
    if lacking:
        say(f"not quantised: {lacking}")
        return None
    tasks = tasks or heldout_tasks(full, config.gate.num_tasks)
    asked = {} if asked is None else asked
    # Each size is another chance to pass by luck: the error probability is shared among them (Bonferroni).
    confidence = 1 - (1 - config.gate.confidence) / len(config.quantize.group_sizes)
    strict = config.model_copy(update={"gate": config.gate.model_copy(update={"confidence": confidence})})
    for group_size in config.quantize.group_sizes:
        made = _judged_before(full, group_size, strict)
        if made is not None:
            said = "; ".join(made.gate["reasons"]) if made.gate else ""
            say(f"AWQ with groups of {group_size}, judged before: {said or 'passed'}")
        else:
            made = _quantised_now(full, group_size, strict, tasks, say, asked)
        if made is not None and made.gate and made.gate["passed"]:
            return made
    say(f"no group size of {config.quantize.group_sizes} passes the gate: full precision is served")
    return None


def _exported(source: str, config: ServeConfig, say: Say) -> Artefact:
    full = export_run(source, config.serve_dir)
    say(f"exported {source}: version {full.digest[:12]}, {full.size_bytes / 1e6:.0f} MB")
    return full


def _admit(full: Artefact, verdict: Verdict, compared: str, say: Say) -> None:
    say(f"gate, {full.digest[:12]} {compared}: {words_of(verdict)}")
    if not verdict.passed:
        raise UserError(f"version {full.digest[:12]} must pass the gate to serve, but {'; '.join(verdict.reasons)}")


def _judged_before(full: Artefact, group_size: int, config: ServeConfig) -> Artefact | None:
    """The quantised version of `full` that this gate has judged already."""
    for folder in artefacts_folder(config.serve_dir).iterdir():
        with suppress(UserError):  # damaged, or half-written by another process
            found = load_artefact(folder)
            made_so = (found.origin.parent, found.origin.quantization) == (full.digest, quantization_of(group_size))
            if made_so and found.gate and found.measurements.get("judged_by") == config.gate.model_dump(mode="json"):
                return found
    return None


def _quantised_now(
    full: Artefact, group_size: int, config: ServeConfig, tasks: Tasks, say: Say, asked: dict[str, Answers]
) -> Artefact | None:
    """The version made and judged; its manifest holds the verdict. None, said why, where it cannot be made."""
    texts = training_texts(full, config.quantize.num_calibration_prompts)
    try:
        made = quantize(full, config.serve_dir, config.quantize, texts, group_size, say)
    except (UserError, RunBroken, DeadlineExceeded) as error:
        say(f"AWQ with groups of {group_size}: {error}")
        return None
    verdict = judge(full, made, config, tasks, say, asked)
    made, full = load_artefact(made.folder), load_artefact(full.folder)
    sizes = f"{made.size_bytes / 1e6:.0f} MB of {full.size_bytes / 1e6:.0f} MB"
    say(f"AWQ with groups of {group_size}: {sizes}, {_speeds(made, full)}")
    say(f"gate, AWQ with groups of {group_size} against full precision: {words_of(verdict)}")
    return made


def _speeds(made: Artefact, full: Artefact) -> str:
    """Both speeds in words."""
    of_made, of_full = (artefact.measurements.get("tokens_per_s", "unknown") for artefact in (made, full))
    return f"{of_made} tokens/s against {of_full}"


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
