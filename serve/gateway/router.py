"""Which version answers a request: the registry's routing, held under a lease, and the same for a whole session."""

import hashlib
import time
from collections.abc import Callable

from core.errors import RunBroken
from serve.registry import Registry, Routing


class Router:
    """A gateway's view of the registry, never older than lease_s.

    Whoever changes the registry waits lease_s; from then on no gateway starts an answer by a version taken away.
    """

    def __init__(self, registry: Registry, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._lease_s, self._clock = registry, lease_s, clock
        self._routing = Routing(0, None, None, 0.0)
        self._read_at = -float("inf")

    def routing(self) -> Routing:
        """The Routing, read again where the lease has run out; RunBroken where the registry cannot be read."""
        now = self._clock()
        if now - self._read_at >= self._lease_s / 2:
            try:
                self._routing = self._registry.routing()
                self._read_at = now
            except RunBroken:
                if now - self._read_at >= self._lease_s:
                    raise
        return self._routing

    def digest_for(self, session: str) -> str:
        """The digest that answers this session. RunBroken where no version was ever registered."""
        routing = self.routing()
        if routing.stable is None:
            raise RunBroken("a version must be registered to answer, got none; deploy one with python -m serve.deploy")
        if routing.canary is not None and position(session) < routing.share:
            return routing.canary
        return routing.stable


def position(session: str) -> float:
    """Where a session stands in 0 to 1: a growing share only ever moves sessions to the canary."""
    return int.from_bytes(hashlib.sha256(session.encode()).digest()[:7], "big") / 2.0**56
