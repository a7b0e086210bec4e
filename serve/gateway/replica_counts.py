"""How many replicas of each version stand, as Ray Serve's controller sees them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError

from core.errors import RunBroken
from serve.gateway.metrics import roles
from serve.names import application_of
from serve.registry import Routing

MAX_AGE_S = 2.0
_STAYING = ("STARTING", "UPDATING", "RECOVERING", "RUNNING")  # the other states are those of replicas that end


class ReplicaCounts:
    """The counts of the versions that have a role, at most MAX_AGE_S old: many askers cost the controller one call."""

    def __init__(self, routing: Callable[[], Routing]) -> None:
        self._routing = routing
        self._counts: dict[str, dict[str, int]] = {}
        self._read_at = -float("inf")
        self._lock = asyncio.Lock()

    async def read(self) -> dict[str, dict[str, int]]:
        """digest -> {healthy, wanted}; a version without replicas is left out. Waits for: Ray Serve's controller."""
        async with self._lock:
            if time.monotonic() - self._read_at > MAX_AGE_S:
                self._counts = self._of_versions(await asyncio.to_thread(replica_counts))
                self._read_at = time.monotonic()
            return self._counts

    def _of_versions(self, of_application: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
        try:
            digests = [digest for digest, _, _ in roles(self._routing())]
        except RunBroken:
            return {}  # said elsewhere on the page
        return {
            digest: of_application[application_of(digest)]
            for digest in digests
            if application_of(digest) in of_application
        }


def replica_counts() -> dict[str, dict[str, int]]:
    """application -> {healthy, wanted} replicas of all its deployments; empty without Ray Serve."""
    if not ray.is_initialized():
        return {}
    try:
        applications = serve.status().applications
    except RayError:
        return {}
    return {name: _counted(application) for name, application in applications.items()}


def _counted(application: Any) -> dict[str, int]:
    states = [
        (str(getattr(state, "value", state)), number)
        for deployment in application.deployments.values()
        for state, number in deployment.replica_states.items()
    ]
    return {
        "healthy": sum(number for state, number in states if state == "RUNNING"),
        "wanted": sum(number for state, number in states if state in _STAYING),
    }
