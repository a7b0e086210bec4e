"""What a request is, beyond what reaches the engine: for whom, by which weights, and how its answer came about."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal

from serve.gateway.metrics import GatewayMetrics

Source = Literal["hit", "miss", "bypass", "coalesced"]


@dataclass
class Scope:
    """One HTTP request on its way through the gateway; the gateway makes it, the remote engine fills in `sources`."""

    tenant: str
    metrics: GatewayMetrics
    may_read: bool = True  # the cache; Cache-Control: no-cache forbids it
    may_write: bool = True  # Cache-Control: no-store forbids it
    sources: list[Source] = field(default_factory=list)  # one a prompt
    error: Exception | None = None  # what ended the answer

    @property
    def source(self) -> Source:
        """How the answer came about; of several prompts, the least cached one."""
        order: tuple[Source, ...] = ("bypass", "miss", "coalesced", "hit")
        return next((source for source in order if source in self.sources), "bypass")


SCOPE: ContextVar[Scope] = ContextVar("scope")
