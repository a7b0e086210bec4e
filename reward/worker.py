"""The reward worker: a group in, one number a sample out. Plain Python; a pool makes Ray actors of it."""

import itertools
import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Protocol

from core.config import RewardConfig, RewardTerm
from core.errors import RunBroken, UserError
from core.trajectory import Group, Prompt
from reward.child_scorer import ChildScorer
from reward.user_function import UserFunction
from reward.verifiers import checked_pattern, exact_scores, last_number_scores, matches, reference_number


class Term(Protocol):
    """One summand of the reward."""

    def check(self) -> None:
        """Does now what could fail later."""

    def scores(self, group: Group) -> list[float]:
        """Scores [G], finite."""

    def close(self) -> None:
        """Ends what the term started."""


@dataclass(frozen=True)
class Verifier:
    """A pure comparison; starts nothing and cannot fail early."""

    compare: Callable[[Group], list[float]]

    def check(self) -> None:
        pass

    def scores(self, group: Group) -> list[float]:
        return self.compare(group)

    def close(self) -> None:
        pass


class Regex:
    """1 where the first group of the pattern's first match is the answer; searched in a child, under the time limit."""

    def __init__(self, term: RewardTerm, position: int, config: RewardConfig) -> None:
        where = f"reward.terms[{position}].pattern"
        if term.pattern is None:
            raise UserError(f"{where} must be set for kind regex")
        self._scorer = ChildScorer(
            {"pattern": checked_pattern(term.pattern, where)}, f"{where} {term.pattern!r}", where, config
        )

    def check(self) -> None:
        self._scorer.check()

    def scores(self, group: Group) -> list[float]:
        return [matches(group.answer, found) for found in self._scorer.values(group)]

    def close(self) -> None:
        self._scorer.close()


class RewardWorker:
    """Scores groups by the weighted sum of the configured terms.

    Raises UserError at construction for a pattern that does not compile. Child processes are started when first needed.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._weights: dict[str, float] = {}
        self._terms: dict[str, Term] = {}
        self._reads_numbers = any(term.kind == "last_number" for term in config.terms)
        for position, term in enumerate(config.terms):
            name = _free_name(term, self._terms)
            self._weights[name], self._terms[name] = term.weight, _made(term, position, config)

    def check(self, prompts: Iterable[Prompt] = ()) -> None:
        """Does what could fail in the middle of a run: loads user functions, starts processes, reads the rows' answers.

        UserError for a person's mistake, naming file and line, or the row; RunBroken for a process that dies each time.
        """
        for term in self._terms.values():
            term.check()
        if self._reads_numbers:
            for prompt in prompts:
                reference_number(prompt.answer, prompt.prompt_id)

    def score(self, group: Group) -> list[float]:
        """Rewards [G]: the weighted sum of the terms, finite, or RunBroken with the sample's name; never a silent 0."""
        columns = self.score_terms(group)
        rewards = []
        for sample in range(group.num_samples):
            parts = {name: self._weights[name] * column[sample] for name, column in columns.items()}
            reward = sum(parts.values())
            if not math.isfinite(reward):
                raise RunBroken(
                    f"the reward of sample {sample} of group {group.group_id} must be finite, got {reward} "
                    f"from {parts}; lower the weights in reward.terms"
                )
            rewards.append(float(reward))
        return rewards

    def score_terms(self, group: Group) -> dict[str, list[float]]:
        """Each term's scores [G] before weighting, by name: its kind, or python_FUNCTION; a second one ends in _2."""
        columns = {}
        for name, term in self._terms.items():
            column = term.scores(group)
            if len(column) != group.num_samples:
                raise RunBroken(
                    f"reward term {name} must give {group.num_samples} scores, got {len(column)} ({group.group_id})"
                )
            columns[name] = column
        return columns

    def close(self) -> None:
        """Ends the terms' child processes."""
        for term in self._terms.values():
            term.close()


def _made(term: RewardTerm, position: int, config: RewardConfig) -> Term:
    if term.kind == "exact":
        return Verifier(lambda group: exact_scores(group.answer, group.text))
    if term.kind == "last_number":
        return Verifier(lambda group: last_number_scores(group.answer, group.text, group.prompt_id))
    return Regex(term, position, config) if term.kind == "regex" else UserFunction(term, position, config)


def _free_name(term: RewardTerm, taken: Container[str]) -> str:
    name = f"python_{term.function}" if term.kind == "python" else term.kind
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in taken)
