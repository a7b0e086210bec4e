"""A user's Python function as a reward, named by file path and function name in the config.

The file holds one of these, sync or async. The third parameter's name decides which; the first two may have any name:

    def score(prompt_id: str, answer: str, text: str) -> float                 # once a sample
    def score(prompt_id: str, answer: str, texts: list[str]) -> list[float]    # once a group: a number a text, in order

It runs in a process of its own, one a reward worker, in its own process group: it may hang, crash, exit or leak without
harm to the run. The process is kept between calls, so module globals live on; the file's folder is on sys.path;
prints go to stderr. An async function of one text is awaited for all samples of a group at once.

* Time: reward.time_limit_s a sample (a function of `texts`: that times the number of texts). A process that says
  nothing for so long is killed with everything it started, and the run ends with an error that names the sample: no
  second try. Where all samples are awaited at once, each reward that comes starts the limit anew for those that are
  left.
* A function that raises, or whose process ends, is asked again after a back-off, at most reward.max_retries times a
  group, and only for the samples still missing; then the run ends with the first cause.
* NaN, infinity, None, text, or a count other than one a sample ends the run at once; True and False are 1 and 0;
  numpy and torch scalars are numbers.
"""

from core.config import RewardConfig, RewardTerm
from core.errors import UserError
from core.trajectory import Group
from reward.child_scorer import ChildScorer


class UserFunction:
    """The function of one reward term; `position` is the term's place in reward.terms, for errors."""

    def __init__(self, term: RewardTerm, position: int, config: RewardConfig) -> None:
        if term.path is None:
            raise UserError(f"reward.terms[{position}].path must be set for kind python")
        name = f"reward function {term.function} ({term.path})"
        load = {"path": str(term.path), "function": term.function}
        self._scorer = ChildScorer(load, name, f"reward.terms[{position}].path", config)

    def check(self) -> None:
        """Loads the file; UserError with file and line where it cannot be used."""
        self._scorer.check()

    def scores(self, group: Group) -> list[float]:
        """The function's rewards [G], all finite; RunBroken or DeadlineExceeded otherwise, naming the sample."""
        return self._scorer.values(group)

    def close(self) -> None:
        """Ends the function's process."""
        self._scorer.close()
