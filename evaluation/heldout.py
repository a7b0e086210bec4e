"""Held-out accuracy: greedy answers to prompts the policy was never trained on, judged by the first reward term."""

from actors.flow import Flow
from core.config import Config
from core.evaluations import Evaluation
from core.trajectory import Prompt, answered


def evaluate(step: int, flow: Flow, prompts: tuple[Prompt, ...], config: Config) -> Evaluation:
    """The Evaluation of the weights that the rollout workers hold now.

    An answer counts as correct where the first reward term gives it at least 0.5.
    """
    asked = list(prompts[: config.evaluation.num_prompts])
    texts = flow.answer_greedily(asked)
    marks = flow.score_first_term(
        [answered(prompt, text, "heldout") for prompt, text in zip(asked, texts, strict=True)]
    )
    correct = [mark >= 0.5 for mark in marks]
    samples = [
        {"prompt": prompt.text, "answer": prompt.answer, "text": text, "correct": right}
        for prompt, text, right in zip(asked, texts, correct, strict=True)
    ][: config.evaluation.num_samples_shown]
    return Evaluation(step, sum(correct) / len(correct), len(correct), sum(correct), samples)
