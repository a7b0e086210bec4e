"""Checks of memory, time and workers."""

from itertools import pairwise

from core.watch.finding import Finding, cures_of
from core.watch.history import WINDOW, History

# Ray's monitor kills workers at 0.95 (RAY_memory_usage_threshold); a tenth free is a step's largest batch on a laptop.
MAX_MEMORY = 0.9
MAX_MEMORY_CRITICAL = 0.95
# The laptop run: pause 5 % of a step, weights 9 to 21 %, grouping 1 %, rollout 23 %, learner 68 %.
MAX_PAUSE = 0.25
# Grouping and weights are overhead. A step is rollouts and learning, so one of them may well be most of it: above 0.85
# even a second worker of the other kind would give nothing.
MAX_PHASE = {"rollout": 0.85, "learner": 0.85, "grouping": 0.3, "weights": 0.4}
MAX_REPLACED = 3  # workers within the last REPLACED_STEPS steps: one may be chance, three are a cause
REPLACED_STEPS = 20


def memory_short(run: History) -> Finding | None:
    """The driver's machine (or its container) is nearly out of memory."""
    shares = History(run.config, run.steps[-WINDOW:]).series("memory_used_share")
    if not shares or max(shares) < MAX_MEMORY:
        return None
    # Those that a config key makes smaller, by the largest.
    sizes = {kind: run.last(f"memory_{kind}_bytes") or 0.0 for kind in ("rollout_engine", "learner", "grouping")}
    largest = max(sizes, key=lambda kind: sizes[kind])
    seen = f"{max(shares):.0%} of the memory is in use" + (
        f", most of it by {largest.replace('_', ' ')} ({sizes[largest] / 2**30:.1f} GiB)" if sizes[largest] else ""
    )
    config = run.config
    smaller = {
        "rollout__kv_cache_bytes": max(1 << 24, config.rollout.kv_cache_bytes // 2),
        "learner__max_tokens_per_micro_batch": max(1, config.learner.max_tokens_per_micro_batch // 2),
    }
    order = sorted(smaller, key=lambda key: key.startswith("rollout") != (largest == "rollout_engine"))
    return Finding(
        "memory_short",
        "critical" if max(shares) >= MAX_MEMORY_CRITICAL else "warning",
        f"{seen}; Ray kills workers at 95 %",
        cures_of(config, **{key: smaller[key] for key in order}),
    )


def pause_long(run: History) -> Finding | None:
    """Weight updates hold up the rollout workers for a large part of each step."""
    pause, seconds = run.recent("weight_update_pause_s"), run.recent("seconds")
    if pause is None or not seconds or pause < MAX_PAUSE * seconds:
        return None
    return Finding(
        "pause_long",
        "note",
        f"rollout workers stand still {pause:.1f} s of a step's {seconds:.1f} s for the new weights ({run.where()})",
        cures_of(run.config, prompts_per_step=2 * run.config.prompts_per_step),
        "put run_dir on a local disk, and see that /dev/shm holds the weights",
    )


def phase_dominates(run: History) -> Finding | None:
    """One phase takes nearly all of a step: the other workers stand idle."""
    seconds = run.recent("seconds")
    if not seconds:
        return None
    shares = {phase: (run.recent(f"{phase}_s") or 0.0) / seconds for phase in MAX_PHASE}
    over = {phase: share / MAX_PHASE[phase] for phase, share in shares.items() if share >= MAX_PHASE[phase]}
    if not over:
        return None
    phase = max(over, key=lambda name: over[name])
    config = run.config
    cures = {
        "rollout": {"rollout__num_workers": config.rollout.num_workers + 1},
        "learner": {
            "learner__num_ranks": config.learner.num_ranks + 1,
            "learner__max_tokens_per_micro_batch": 2 * config.learner.max_tokens_per_micro_batch,
        },
        "grouping": {"grouping__recompute_every": 2 * config.grouping.recompute_every},
        "weights": {"prompts_per_step": 2 * config.prompts_per_step},
    }[phase]
    if phase == "learner" and config.learner.num_ranks >= config.prompts_per_step:
        del cures["learner__num_ranks"]
    return Finding(
        "phase_dominates",
        "note",
        f"{phase} takes {shares[phase]:.0%} of a step of {seconds:.1f} s ({run.where()})",
        cures_of(config, **cures),
    )


def workers_dying(run: History) -> Finding | None:
    """Workers die, or fall silent, again and again."""
    counts = History(run.config, run.steps[-REPLACED_STEPS - 1 :]).series("workers_replaced")
    # Each start of the program counts anew, so only rises count.
    replaced = sum(max(0.0, after - before) for before, after in pairwise(counts))
    if replaced < MAX_REPLACED:
        return None
    return Finding(
        "workers_dying",
        "warning",
        f"{replaced:.0f} workers were replaced in the last {len(counts) - 1} steps",
        cures_of(run.config, deadlines__rollout_s=2 * run.config.deadlines.rollout_s),
        "where they died rather than fell silent, their logs under /tmp/ray/session_latest/logs say why",
    )
