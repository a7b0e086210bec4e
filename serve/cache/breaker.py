"""The circuit breaker in front of Redis: failures in a row open it, a probe that succeeds closes it."""

import logging
from typing import Literal

State = Literal["closed", "open", "half_open"]

logger = logging.getLogger(__name__)


class Breaker:
    """Counts what the commands of one link report; one log line a state change, however many requests come."""

    def __init__(self, max_failures: int, where: str) -> None:
        self.state: State = "closed"
        self.num_opens = 0
        self._max_failures, self._where = max_failures, where
        self._num_failures = 0  # in a row

    def succeeded(self) -> None:
        """A command was answered. One that was sent before the breaker opened does not close it: only a probe does."""
        self._num_failures = 0

    def failed(self, reason: str) -> bool:
        """Whether this failure has opened the breaker."""
        self._num_failures += 1
        if self.state != "closed" or self._num_failures < self._max_failures:
            return False
        self.state = "open"
        self.num_opens += 1
        logger.warning(
            "cache bypassed: %s must answer, got %d failures in a row, the last: %s; requests go on without it",
            self._where,
            self._num_failures,
            reason,
        )
        return True

    def probing(self) -> None:
        """Half open: one probe is under way; everyone else still bypasses."""
        self.state = "half_open"

    def probed(self, answered: bool) -> None:
        if not answered:
            self.state = "open"
            return
        self.state, self._num_failures = "closed", 0
        logger.warning("cache back: %s answers again", self._where)
