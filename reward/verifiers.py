"""Verifiers: pure comparisons of an answer's text with the row's reference answer, each 0 or 1.

They read the model's text and never evaluate it: no eval, no symbolic parser, no pickle. Exact and last_number take
time linear in the text. A regex need not, so it is searched in a child process under the time limit
(reward.child_scorer).
"""

import re

from core.errors import UserError
from reward.number import Number, last_number, whole_number


def exact_scores(answer: str, texts: tuple[str, ...]) -> list[float]:
    """Scores [G]: 1 where the text is the answer, character for character, but for white space around either."""
    return [float(text.strip() == answer.strip()) for text in texts]


def last_number_scores(answer: str, texts: tuple[str, ...], prompt_id: str) -> list[float]:
    """Scores [G]: 1 where the last number in the text equals the answer, as exact numbers.

    Raises UserError where the answer is not a number.
    """
    wanted = reference_number(answer, prompt_id)
    return [float(last_number(text) == wanted) for text in texts]


def reference_number(answer: str, prompt_id: str) -> Number:
    """The number a row's answer is; behind the last `####` where it holds one, as in GSM8K. UserError names the row."""
    number = whole_number(answer.rpartition("####")[2])
    if number is None:
        raise UserError(
            f"the answer of row {prompt_id} must be a number for reward kind last_number, got {shortened(answer)}; "
            "correct the row, or use kind exact"
        )
    return number


def matches(answer: str, found: str | None) -> float:
    """1 where what a pattern found equals the answer: as numbers where both are, else as text without outer space."""
    if found is None:
        return 0.0
    left, right = whole_number(found), whole_number(answer)
    if left is not None and right is not None:
        return float(left == right)
    return float(found.strip() == answer.strip())


def checked_pattern(pattern: str, where: str) -> str:
    """The pattern itself, once it compiles and has a group; UserError otherwise."""
    try:
        num_groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{where} must be a regular expression, got {shortened(pattern)}: {error}") from None
    if num_groups < 1:
        raise UserError(
            f"{where} must hold a group in round brackets, got {shortened(pattern)}; its first group is compared"
        )
    return pattern


def shortened(text: str, limit: int = 80) -> str:
    """The text in quotation marks, cut to `limit` characters."""
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "..."
