"""The gate: what a version must show, on the engine that will serve it, before any client meets it."""

from dataclasses import asdict, dataclass

from core.errors import RunBroken, UserError
from serve.artefacts.artefact import Artefact, flaw, record
from serve.artefacts.tensors import find_nonfinite
from serve.child import Say, say_plainly
from serve.config import GateConfig, ServeConfig
from serve.gate.paired import PairedLoss, compare
from serve.gate.probe import Answers, ask
from serve.gate.tasks import Tasks, score

MAX_FIRST_PERPLEXITY = 1000.0  # of a version with nothing to compare it with; models of the field have 10 to 100


@dataclass(frozen=True)
class Verdict:
    """Whether a version may serve, and why not. The fields of a comparison are None where there was none."""

    passed: bool
    reasons: tuple[str, ...]  # a sentence each; none where it passed
    num_tasks: int
    full_reward: float | None
    candidate_reward: float | None
    relative_loss: float | None
    upper_bound: float | None
    needed_tasks: int | None
    perplexity_full: float | None
    perplexity_candidate: float | None
    golden_ok: bool


def judge(
    full: Artefact | None,
    candidate: Artefact,
    config: ServeConfig,
    tasks: Tasks,
    say: Say = say_plainly,
    asked: dict[str, Answers] | None = None,
) -> Verdict:
    """The Verdict on `candidate` against `full`, written into its manifest with the speeds and sizes of both.

    Without `full` (the first version of all) only integrity, perplexity and golden prompts are looked at. `asked` holds
    what versions answered to these very tasks before, by digest; it is added to, so that nobody is asked twice.
    """
    asked = {} if asked is None else asked
    reasons = [*_damage("candidate", candidate), *(_damage("full model", full) if full else [])]
    if full and len(tasks.prompts) < 2:
        reasons.append(f"a comparison must have at least 2 tasks, got {len(tasks.prompts)}")
    for name, artefact in (("candidate", candidate), ("full model", full)):
        if artefact is None or reasons or artefact.digest in asked:
            continue
        try:
            answers = ask(artefact, tasks, config, say)
        except RunBroken as error:
            reasons.append(f"the {name} must answer on the engine that will serve it: {error}")
            continue
        asked[artefact.digest] = answers
        record(artefact, tokens_per_s=round(answers.tokens_per_s, 1), size_bytes=artefact.size_bytes)
    if reasons:
        verdict = refused(reasons, len(tasks.prompts))
    else:
        verdict = decide(asked[full.digest] if full else None, asked[candidate.digest], tasks, config.gate)
    try:
        record(candidate, gate=asdict(verdict), judged_by=config.gate.model_dump(mode="json"))
    except UserError:  # its manifest is what is damaged; the verdict says so
        say(f"the verdict on {candidate.digest[:12]} could not be written into its manifest")
    return verdict


def decide(full: Answers | None, candidate: Answers, tasks: Tasks, config: GateConfig) -> Verdict:
    """The Verdict of what both versions did; pure but for the reward terms."""
    reasons = [*candidate.golden_flaws, *_perplexity_flaws(full, candidate, config)]
    loss: PairedLoss | None = None
    candidate_reward: float | None = None
    try:
        rewards = score(tasks, candidate.texts)
        if full is not None:
            loss = compare(score(tasks, full.texts), rewards, config.confidence, config.max_relative_loss)
            reasons += _loss_flaws(loss, config)
        candidate_reward = sum(rewards) / len(rewards) if rewards else None
    except (UserError, RunBroken) as error:  # rewards outside 0..1, a user's function that fails
        reasons.append(str(error))
    return Verdict(
        passed=not reasons,
        reasons=tuple(reasons),
        num_tasks=len(tasks.prompts),
        full_reward=loss.full_reward if loss else None,
        candidate_reward=candidate_reward,
        relative_loss=loss.relative_loss if loss else None,
        upper_bound=loss.upper_bound if loss else None,
        needed_tasks=loss.needed_tasks if loss else None,
        perplexity_full=full.perplexity if full else None,
        perplexity_candidate=candidate.perplexity,
        golden_ok=not candidate.golden_flaws,
    )


def refused(reasons: list[str], num_tasks: int) -> Verdict:
    """The Verdict on a version that could not be asked."""
    return Verdict(False, tuple(reasons), num_tasks, None, None, None, None, None, None, None, False)


def _damage(name: str, artefact: Artefact) -> list[str]:
    try:
        wrong = flaw(artefact.folder)
        bad = None if wrong else find_nonfinite(artefact.folder)
    except UserError as error:  # its hashes are right and its safetensors are none
        wrong, bad = str(error), None
    if wrong:
        return [f"the {name} {artefact.digest[:12]} must be whole: {wrong}"]
    return [f"the {name} {artefact.digest[:12]} must have finite weights, got {bad}"] if bad else []


def _perplexity_flaws(full: Answers | None, candidate: Answers, config: GateConfig) -> list[str]:
    limit = MAX_FIRST_PERPLEXITY
    of_full = ""
    if full is not None:
        if full.perplexity is None:
            return ["the full model's perplexity must be finite to be compared with"]
        limit = config.max_perplexity_ratio * full.perplexity
        of_full = f" ({config.max_perplexity_ratio:g} x {full.perplexity:.2f} of the full model)"
    if candidate.perplexity is None:
        return ["perplexity on the fixed text must be finite, got none"]
    if candidate.perplexity <= limit:
        return []
    return [f"perplexity on the fixed text must be at most {limit:.2f}{of_full}, got {candidate.perplexity:.2f}"]


def _loss_flaws(loss: PairedLoss, config: GateConfig) -> list[str]:
    if loss.relative_loss is None:
        return [f"the full model must earn some reward to be compared with, got 0 on {loss.num_tasks} tasks"]
    if loss.upper_bound < config.max_relative_loss:
        return []
    said = (
        f"the relative loss of reward must be below {config.max_relative_loss:.2%} at {config.confidence:.0%} "
        f"confidence, got up to {loss.upper_bound:.2%} on {loss.num_tasks} tasks ({loss.full_reward:.4f} full, "
        f"{loss.candidate_reward:.4f} candidate, a loss of {loss.relative_loss:.2%})"
    )
    if loss.needed_tasks is None:
        return [f"{said}; more tasks would not change that"]
    return [f"{said}; needs about {loss.needed_tasks} tasks to tell (gate.num_tasks)"]
