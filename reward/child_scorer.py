"""Scores from a child process: loading, the time limit, tries with back-off, and errors that name the sample."""

import time
from collections.abc import Callable
from typing import Any

from core.config import RewardConfig
from core.errors import DeadlineExceeded, RunBroken, UserError
from core.trajectory import Group
from reward.child import Child, ChildEnded, ChildSilent

MAX_BACKOFF_S = 30.0
GRACE_S = 1.0  # for user code to end by itself when the run closes


class _TryFailed(Exception):
    """One try that may be repeated; says why."""


class ChildScorer:
    """What a child process answers for each sample of a group; the process is started when first needed, and kept.

    `load` is what the child is to load ({"path", "function"} or {"pattern"}), `name` what errors call it, `where` its
    config keys.
    """

    def __init__(self, load: dict[str, str], name: str, where: str, config: RewardConfig) -> None:
        self._load, self._name, self._where, self._config = load, name, where, config
        self._child: Child | None = None
        self._takes_all = False  # a function of `texts`

    def check(self) -> None:
        """Starts the child, which loads; UserError where a user's file is wrong, RunBroken where it dies each time."""
        self._tried(self._started, "while it was loaded")

    def values(self, group: Group) -> list[Any]:
        """One value [G] a sample, as the child gave them.

        Waits for the child; unblocked by its answers, or by the time limit (DeadlineExceeded). A group gets at most
        max_retries + 1 tries, of which the later ones ask only for the samples still without a value; then RunBroken
        with the first cause. A value that is no finite number, or a wrong count of them, is RunBroken at once.
        """
        values: dict[int, Any] = {}
        self._tried(lambda: self._ask(group, values), f"on group {group.group_id}")
        return [values[sample] for sample in range(group.num_samples)]

    def close(self) -> None:
        """Ends the child process."""
        if self._child is not None:
            self._child.close(GRACE_S)
            self._child = None

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _tried(self, action: Callable[[], Any], when: str) -> None:
        first_cause = ""
        for num_failed in range(self._config.max_retries + 1):
            if num_failed:
                time.sleep(min(MAX_BACKOFF_S, self._config.retry_backoff_s * 2 ** (num_failed - 1)))
            try:
                action()
                return
            except (_TryFailed, ChildEnded) as error:
                if isinstance(error, ChildEnded):
                    self._drop()
                first_cause = first_cause or str(error)
            except BaseException:
                self._drop()  # its answers to this job must not be taken for those to the next
                raise
        raise RunBroken(
            f"{self._name} must give rewards, got {self._config.max_retries + 1} failed tries {when} "
            f"(reward.max_retries is {self._config.max_retries}); first cause: {first_cause}"
        )

    def _started(self) -> Child:
        if self._child is not None:
            return self._child
        self._child = Child()
        limit_s = self._config.import_limit_s
        try:
            self._child.send(self._load, limit_s)
            reply = self._child.receive(limit_s)
        except ChildEnded as error:
            raise ChildEnded(f"{error} while it was loaded") from None
        except ChildSilent:
            raise DeadlineExceeded(
                f"{self._name} must load within {limit_s:g} s, got nothing by then; "
                "make its import faster or raise reward.import_limit_s"
            ) from None
        if "mistake" in reply:
            raise UserError(f"{self._where} {reply['mistake']}")
        self._takes_all = reply["form"] == "texts"
        return self._child

    def _ask(self, group: Group, values: dict[int, Any]) -> None:
        """One try: asks for the samples without a value and notes those that come."""
        child = self._started()
        missing = [sample for sample in range(group.num_samples) if sample not in values]
        job = {"prompt_id": group.prompt_id, "answer": group.answer, "samples": missing}
        limit_s = self._config.time_limit_s * (len(missing) if self._takes_all else 1)
        failure = ""
        try:
            child.send(job | {"texts": [group.text[sample] for sample in missing]}, limit_s)
            while "done" not in (reply := child.receive(limit_s)):
                if "value" in reply:
                    values[reply["sample"]] = reply["value"]
                elif "wrong" in reply:
                    raise RunBroken(self._wrong(reply, group))
                else:
                    failure = failure or f"{reply['raised']}, {_place(reply['sample'], group)}"
        except ChildSilent:
            waiting = [sample for sample in missing if sample not in values]
            raise DeadlineExceeded(self._overdue(waiting, limit_s, group)) from None
        except ChildEnded as error:
            waiting = [sample for sample in missing if sample not in values]
            raise ChildEnded(f"{error}, {_place(None if self._takes_all else waiting[0], group)}") from None
        if failure:
            raise _TryFailed(failure)

    def _wrong(self, reply: dict[str, Any], group: Group) -> str:
        wanted = "one finite number a sample" if reply["sample"] is None else "a finite number"
        place = _place(reply["sample"], group)
        return f"{self._name} must give {wanted}, got {reply['wrong']} ({place}); correct the function"

    def _overdue(self, waiting: list[int], limit_s: float, group: Group) -> str:
        whom = (
            f"samples {', '.join(map(str, waiting))}"
            if self._takes_all
            else f"sample {waiting[0] if waiting else 'last'}"
        )
        return (
            f"{self._name} must score a sample within {self._config.time_limit_s:g} s, got nothing for {whom} of group "
            f"{group.group_id} in {limit_s:g} s; make it faster or raise reward.time_limit_s"
        )


def _place(sample: int | None, group: Group) -> str:
    return f"group {group.group_id}" if sample is None else f"sample {sample} of group {group.group_id}"
