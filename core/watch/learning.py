"""Checks of what the policy learns: reward, diversity, held-out accuracy, signal, mismatch, cut answers.

Each takes a History and gives a Finding or None; None too where the run is too short to say.
"""

import math
import statistics
from itertools import pairwise

from core.config import Config
from core.evaluations import Evaluation
from core.watch.finding import Finding, Severity, cures_of
from core.watch.history import WINDOW, History

# A step's mean of P prompts has a spread of at most std / sqrt(P), as if all answers to a prompt agreed: a healthy run
# stays at 1 or below (0.9 in the laptop run). By chance twice that: 1 in 1,000 of ten steps, 1 in 50,000 of 20.
MAX_VOLATILITY = 2.0
VOLATILITY_STEPS = 20
MIN_VOLATILITY_STEPS = 10
# The laptop run, healthy, falls to a sixth of its first entropy and to half of its new answers while its reward rises.
# A third of both, with a reward that has stopped rising, is a policy that no longer looks for better answers.
MAX_DIVERSITY_LEFT = 1 / 3
# Standard errors of held-out accuracy, as if two evaluations asked different prompts: they ask the same ones, so chance
# moves them less. One evaluation can be unlucky, so two must be low, or one very low.
MAX_DECLINE = 2.0
MAX_DECLINE_OF_ONE = 4.0
# With the group's own mean as baseline 4 of 5 prompts then teach nothing; the laptop run starts at 0.63.
MAX_ZERO_VARIANCE = 0.8
FALLEN = 3.0  # the reward of before over that of now: then the policy broke, and the prompts are not too hard
# nats: exp(0.15) puts a typical token's probability 16 % off. bfloat16 against bfloat16 stays at 0.01 to 0.05 here.
MAX_MISMATCH = 0.15
MISMATCH_GROWTH = 2.0
MIN_MISMATCH_GROWN = 0.05
MAX_IMPORTANCE_TRUNCATED = 0.05
# A third of the answers without an end. The laptop run starts at 0.8 and learns to stop, so a share that falls is none.
MAX_TRUNCATED = 0.3
TRUNCATED_LEFT = 0.9
NEAR_BEST = 0.9  # of the largest reward: repeating itself, a policy is then right


def reward_volatility(run: History) -> float | None:
    """How much more the step's mean reward moves than sampling explains: 1 is no more; None for less than ten steps.

    Root mean square of successive differences over sqrt(2) (von Neumann 1941: a trend hardly counts), as a multiple of
    std / sqrt(prompts).
    """
    rows = run.steps[-VOLATILITY_STEPS:]
    means = History(run.config, rows).series("reward_mean")
    stds = History(run.config, rows).series("reward_std")
    if len(means) < MIN_VOLATILITY_STEPS or not stds:
        return None
    moved = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in pairwise(means)) / 2)
    # The mean of the squares: steps whose answers all fail have no spread of their own.
    expected = math.sqrt(statistics.fmean(std**2 for std in stds) / run.config.prompts_per_step)
    return moved / expected if expected > 0 else None


def reward_volatile(run: History) -> Finding | None:
    """The step's mean reward jumps more than the draw of prompts and answers explains: the updates are too large."""
    ratio = reward_volatility(run)
    if ratio is None or ratio < MAX_VOLATILITY:
        return None
    learner = run.config.learner
    seen = f"the mean reward moved {ratio:.1f} times as much between steps as the draw of prompts explains"
    return Finding(
        "reward_volatile",
        "warning",
        f"{seen} ({run.where()}; {MAX_VOLATILITY:g} is too much)",
        cures_of(
            run.config,
            learner__learning_rate=learner.learning_rate / 2,
            learner__max_grad_norm=learner.max_grad_norm / 2,
        ),
    )


def outputs_conservative(run: History) -> Finding | None:
    """Entropy and the share of new answers have collapsed while the reward no longer rises and is not near its best."""
    entropy, distinct, pairs = (run.change(key) for key in ("entropy", "distinct_share", "distinct_2"))
    reward, before = run.recent("reward_mean"), run.recent("reward_mean", ago=2)
    if entropy is None or distinct is None or reward is None or before is None:
        return None
    new = [_new_answers(share, run.config.rollout.samples_per_prompt) for share in distinct]
    collapsed = entropy[1] < MAX_DIVERSITY_LEFT * entropy[0] and new[1] < MAX_DIVERSITY_LEFT * new[0]
    if not collapsed or reward > before or is_near_best(run.config, reward):
        return None
    seen = f"entropy {entropy[0]:.2f} -> {entropy[1]:.2f} nats, new answers in a group {new[0]:.0%} -> {new[1]:.0%}"
    seen += f", distinct-2 {pairs[0]:.2f} -> {pairs[1]:.2f}" if pairs is not None else ""
    learner, rollout = run.config.learner, run.config.rollout
    return Finding(
        "outputs_conservative",
        "warning",
        f"answers repeat themselves and the reward no longer rises: {seen}, reward {before:.2f} -> {reward:.2f}",
        cures_of(
            run.config,
            learner__kl_coefficient=max(0.02, 2 * learner.kl_coefficient),
            learner__learning_rate=learner.learning_rate / 2,
            learner__clip_high=max(0.28, learner.clip_high),
            rollout__temperature=max(1.0, rollout.temperature),
        ),
    )


def heldout_decline(run: History) -> float | None:
    """How many standard errors held-out accuracy lies below its best; None for fewer than two evaluations.

    The mean of the last two, where both came after the best; else the last one, halved, as one can be unlucky.
    """
    if len(run.evaluations) < 2:
        return None
    best = _best(run)
    after = [one for one in run.evaluations if one.step > best.step][-2:]
    if not after:
        return 0.0
    now, num_prompts = statistics.fmean(one.accuracy for one in after), sum(one.num_prompts for one in after)
    # Half a prompt on each side: at 0 or 1 the plain error would be 0.
    variance = _spread(best.accuracy, best.num_prompts) + _spread(now, num_prompts)
    errors = (best.accuracy - now) / math.sqrt(variance)
    return errors if len(after) == 2 else errors * MAX_DECLINE / MAX_DECLINE_OF_ONE


def heldout_declining(run: History) -> Finding | None:
    """Held-out accuracy has left its best behind by more than chance explains: overfitted, or the reward is gamed."""
    errors = heldout_decline(run)
    if errors is None or errors < MAX_DECLINE:
        return None
    best, last = _best(run), run.evaluations[-1]
    reward, before = run.recent("reward_mean"), run.recent("reward_mean", ago=1)
    gamed = reward is not None and before is not None and reward >= before > 0
    kept = max((step for step in run.checkpoints if step <= best.step), default=None)
    advice = f"the checkpoint of step {kept} is from before the decline" if kept is not None else ""
    learner, checkpoint = run.config.learner, run.config.checkpoint
    return Finding(
        "heldout_declining",
        "warning",
        f"held-out accuracy {best.accuracy:.3f} after {best.step} steps, {last.accuracy:.3f} after {last.step}"
        + (", while the training reward holds or rises" if gamed else ""),
        cures_of(
            run.config,
            learner__learning_rate=learner.learning_rate / 2,
            learner__kl_coefficient=max(0.02, 2 * learner.kl_coefficient),
            **({} if kept is not None else {"checkpoint__keep": checkpoint.keep + 3}),
        ),
        advice,
    )


def groups_uninformative(run: History) -> Finding | None:
    """Nearly every prompt's answers get one and the same reward: too hard, too easy, or answers all alike."""
    share, reward, size = (run.recent(key) for key in ("zero_variance_share", "reward_mean", "advantage_abs_mean"))
    if share is None or reward is None or share < MAX_ZERO_VARIANCE:
        return None
    config = run.config
    seen = f"all answers to a prompt get the same reward in {share:.0%} of the groups, mean reward {reward:.2f}"
    severity: Severity = "warning"
    advice = ""
    if is_near_best(config, reward):
        severity, advice = "note", "nearly all is solved: end the run, or give harder prompts"
        cures = cures_of(config, data__arithmetic__max_operand=4 * config.data.arithmetic.max_operand)
        cures = cures if config.data.source == "arithmetic" else ()
    else:
        if size == 0.0:
            severity = "critical"
        earlier = History(config, run.steps[:-WINDOW]).series("reward_mean")
        fallen = bool(earlier) and statistics.fmean(earlier) > FALLEN * reward
        if fallen:
            seen += f", {statistics.fmean(earlier):.2f} before"
            advice = "the policy is broken, and so are its newest checkpoints: use a new run_dir"
        cures = cures_of(
            config,
            **({"learner__learning_rate": config.learner.learning_rate / 2} if fallen else {}),
            rollout__temperature=max(1.0, round(1.2 * config.rollout.temperature, 2)),
            grouping__baseline="semantic",
            rollout__samples_per_prompt=2 * config.rollout.samples_per_prompt,
        )
    return Finding("groups_uninformative", severity, f"{seen} ({run.where()})", cures, advice)


def sampler_mismatch(run: History) -> Finding | None:
    """Sampler and trainer give the same tokens ever more different probabilities: the update is of another policy."""
    key = "mean_abs_logprob_difference"
    mismatch, then, cut = run.recent(key), run.opening(key), run.recent("importance_truncated_share")
    grown = mismatch is not None and then is not None and mismatch >= max(MISMATCH_GROWTH * then, MIN_MISMATCH_GROWN)
    many_cut = cut is not None and cut >= MAX_IMPORTANCE_TRUNCATED
    if mismatch is None or not (grown or many_cut or mismatch >= MAX_MISMATCH):
        return None
    seen = f"sampler and trainer differ by {mismatch:.3f} nats a token"
    seen += f", {then:.3f} at the start" if then is not None else ""
    seen += f"; {cut:.1%} of importance weights are truncated" if many_cut else ""
    rollout = run.config.rollout
    wanted: dict[str, object] = {}
    if rollout.top_p < 1 or rollout.top_k:
        wanted = {"rollout__top_p": 1.0, "rollout__top_k": 0}
    elif rollout.dtype != "float32" or run.config.learner.dtype != "float32":
        wanted = {"rollout__dtype": "float32", "learner__dtype": "float32"}
    wanted["learner__learning_rate"] = run.config.learner.learning_rate / 2
    return Finding("sampler_mismatch", "warning", f"{seen} ({run.where()})", cures_of(run.config, **wanted))


def answers_truncated(run: History) -> Finding | None:
    """Many answers are cut off by length, and training does not make them fewer."""
    share, then = run.recent("truncated_share"), run.opening("truncated_share")
    if share is None or then is None or share < MAX_TRUNCATED or share < TRUNCATED_LEFT * then:
        return None
    config = run.config
    length = run.recent("answer_tokens_mean")
    seen = f"{share:.0%} of the answers are cut off at {config.rollout.max_new_tokens} tokens, {then:.0%} at the start"
    seen += f" (mean length {length:.0f})" if length is not None else ""
    wanted = {"rollout__max_new_tokens": 2 * config.rollout.max_new_tokens, "learner__mask_truncated": True}
    return Finding("answers_truncated", "warning", seen, cures_of(config, **wanted))


def is_near_best(config: Config, reward: float) -> bool:
    """Whether a mean reward is near the largest the config can give; never where a user's function has no known one."""
    best = sum(max(0.0, term.weight) for term in config.reward.terms)
    return best > 0 and reward >= NEAR_BEST * best and all(term.kind != "python" for term in config.reward.terms)


def _best(run: History) -> Evaluation:
    """The evaluation with the highest accuracy; of equal ones the last."""
    return max(run.evaluations, key=lambda one: (one.accuracy, one.step))


def _spread(accuracy: float, num_prompts: int) -> float:
    share = (accuracy * num_prompts + 0.5) / (num_prompts + 1)
    return share * (1 - share) / max(1, num_prompts)


def _new_answers(distinct_share: float, num_samples: int) -> float:
    """The share of a group's answers, after its first, that are new: 0 where all are alike, 1 where none are."""
    return (distinct_share * num_samples - 1) / (num_samples - 1) if num_samples > 1 else 1.0
