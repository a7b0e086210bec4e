"""The gateway's numbers as Ray's metrics: their names, labels and buckets; Ray's agents show them to Prometheus.

Counters, histograms and gauges appear there as ray_grpo_serve_NAME, with _total behind a counter's name.
"""

from collections import Counter as CounterOf
from collections import deque
from dataclasses import dataclass, field

from ray.util.metrics import Counter, Gauge, Histogram

from cluster.standing_gauges import StandingGauges

PREFIX = "grpo_serve_"
MAX_OBSERVATIONS = 50_000  # of one batch; the oldest go where nobody collects
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)

REQUEST = ("route", "status", "version", "cache")
COUNTERS = {
    "requests": ("Requests under /v1/ that have ended; status 499: the client did not wait", REQUEST),
    "refusals": ("Requests turned away, by reason", ("reason",)),
    "tokens": ("Tokens of prompts and of answers", ("kind", "version", "cache")),
    "cache_events": ("What the response cache did", ("event",)),
}
HISTOGRAMS = {
    "request_seconds": ("Seconds from a request to the end of its answer", REQUEST, SECONDS),
    "first_token_seconds": ("Seconds to the first token of a streamed answer", ("version", "cache"), SECONDS),
    "token_seconds": (
        "Seconds a token of a streamed answer, after its first piece",
        ("version", "cache"),
        TOKEN_SECONDS,
    ),
}
GAUGES = {
    "in_flight": ("Requests being answered", ("gateway",)),
    "breaker_open": ("The cache's circuit breaker: 0 closed, 0.5 half open, 1 open", ("gateway",)),
    "version_share": ("Share of traffic a version is to have", ("version", "role")),
}

Key = tuple[str, tuple[str, ...]]  # name, values of its labels


@dataclass
class Batch:
    """What has come together since the last time."""

    counts: CounterOf[Key] = field(default_factory=CounterOf)
    observations: deque[tuple[str, tuple[str, ...], float]] = field(
        default_factory=lambda: deque(maxlen=MAX_OBSERVATIONS)
    )
    gauges: dict[Key, float] = field(default_factory=dict)

    def count(self, name: str, labels: tuple[str, ...], number: int = 1) -> None:
        self.counts[name, labels] += number

    def observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self.observations.append((name, labels, value))


class Instruments:
    """Ray's metrics of this process; Ray must be running when one is made."""

    def __init__(self) -> None:
        self._counters = {name: Counter(PREFIX + name, words, labels) for name, (words, labels) in COUNTERS.items()}
        self._histograms = {
            name: Histogram(PREFIX + name, words, list(bounds), labels)
            for name, (words, labels, bounds) in HISTOGRAMS.items()
        }
        self._gauges = {name: Gauge(PREFIX + name, words, labels) for name, (words, labels) in GAUGES.items()}

    def hand_over(self, batch: Batch) -> None:
        """Records a batch. A gauge that no batch sets any more fades by itself: Ray forgets it within 20 s."""
        for (name, values), number in batch.counts.items():
            if number > 0:
                self._counters[name].inc(number, dict(zip(COUNTERS[name][1], values, strict=True)))
        for name, values, value in batch.observations:
            self._histograms[name].observe(value, dict(zip(HISTOGRAMS[name][1], values, strict=True)))
        for (name, values), value in batch.gauges.items():
            self._gauges[name].set(value, dict(zip(GAUGES[name][1], values, strict=True)))


class RewardGauge:
    """Reward by version, for whoever sends the probe set."""

    def __init__(self) -> None:
        self._gauges = StandingGauges(PREFIX, ("version",))

    def set(self, version: str, reward: float) -> None:
        """version: the first digits of a digest, as in the other metrics."""
        self._gauges.set("version_reward", (version,), reward, "Mean reward of a version's answers to the probe set")

    def close(self) -> None:
        """Its values fade."""
        self._gauges.close()
