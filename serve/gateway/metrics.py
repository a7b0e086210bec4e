"""What the gateway counts: totals and the recent seconds for its page, and the same numbers for Prometheus.

A request costs a few updates of dictionaries. A thread hands what has come together to Ray's metrics once a second;
without Ray it is dropped, and totals and page go on.
"""

import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.errors import RunBroken
from serve.gateway.exchange import AnswerMeter, Exchange
from serve.gateway.instruments import Batch, Instruments
from serve.registry import Routing

ANSWERS = ("/v1/chat/completions", "/v1/completions")
ROUTES = (*ANSWERS, "/v1/models")
SHORT = 12  # digits of a digest in a label
WINDOW_S = 30.0  # what the page calls now
NUM_RECENT = 8192  # answers held for it
FLUSH_S = 1.0


@dataclass(frozen=True)
class Recent:
    """One finished answer, for the page."""

    ended: float
    seconds: float
    source: str


class GatewayMetrics:
    """The numbers of one gateway process; any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._lock = threading.Lock()
        self._batch = Batch()
        self._instruments: Instruments | None = None
        self._sources: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._recent: deque[Recent] = deque(maxlen=NUM_RECENT)
        self._in_flight = 0
        self._cache: Callable[[], Mapping[str, Any]] | None = None
        self._routing: Callable[[], Routing] | None = None
        self._cache_before: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, routing: Callable[[], Routing], cache: Callable[[], Mapping[str, Any]] | None) -> None:
        """From now on, gauges and page show this routing and this cache: its `state`, a breaker's, and its counts."""
        self._routing, self._cache = routing, cache

    def start(self) -> None:
        """Starts the thread that hands the numbers to Ray."""
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hands over what is left and ends the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, route: str) -> Exchange:
        """A request has come in; to be given to `end`."""
        with self._lock:
            self._in_flight += 1
        return Exchange(route, self._clock())

    def end(self, exchange: Exchange) -> None:
        """The request has ended, one way or another."""
        now = self._clock()
        status, seconds = str(exchange.status), now - exchange.began
        labels = (exchange.route, status, exchange.version[:SHORT], exchange.source)
        with self._lock:
            self._in_flight -= 1
            self._batch.count("requests", labels)
            self._batch.observe("request_seconds", labels, seconds)
            if exchange.route not in ANSWERS:
                return
            self._statuses[status] += 1
            if exchange.source != "none":
                self._sources[exchange.source] += 1
                self._versions[exchange.version] += 1
                self._recent.append(Recent(now, seconds, exchange.source))

    def refused(self, reason: str) -> None:
        """A request was turned away: `queue`, `rate` or `key`."""
        with self._lock:
            self._refusals[reason] += 1
            self._batch.count("refusals", (reason,))

    def answer(self, digest: str, num_prompt_tokens: int, source: Callable[[], str]) -> AnswerMeter:
        """The AnswerMeter of one prompt's answer; `source` is asked once the answer has ended."""
        return AnswerMeter(self.answered, digest, num_prompt_tokens, source, self._clock)

    def answered(self, meter: AnswerMeter) -> None:
        """Takes in what a meter has read."""
        labels, per_token_s = (meter.digest[:SHORT], meter.source()), meter.per_token_s
        with self._lock:
            for kind, number in (("prompt", meter.num_prompt_tokens), ("answer", meter.tokens.total())):
                self._tokens[kind] += number
                self._batch.count("tokens", (kind, *labels), number)
            if meter.first_s is not None:
                self._batch.observe("first_token_seconds", labels, meter.first_s)
            if per_token_s is not None:
                self._batch.observe("token_seconds", labels, per_token_s)

    def snapshot(self) -> dict[str, Any]:
        """What the page shows, in JSON's own types; `now` is the last WINDOW_S seconds, the rest counts from start."""
        now = self._clock()
        with self._lock:
            recent = [item for item in self._recent if now - item.ended <= WINDOW_S]
            uptime_s = now - self._began
            # A ring that overflowed holds less than the window; the first second is not yet a rate.
            window_s = now - recent[0].ended if len(recent) == NUM_RECENT else min(WINDOW_S, max(uptime_s, 1.0))
            sources, statuses = dict(self._sources), dict(self._statuses)
            refusals, tokens = dict(self._refusals), dict(self._tokens)
            in_flight, versions = self._in_flight, dict(self._versions)
        seconds = sorted(item.seconds for item in recent)
        rate = len(recent) / max(window_s, 1e-9)
        return {
            "gateway": os.getpid(),
            "uptime_s": uptime_s,
            "in_flight": in_flight,
            "now": {
                "requests_per_s": rate,
                "p50_s": quantile(seconds, 0.5),
                "p99_s": quantile(seconds, 0.99),
                "hit_ratio": hit_ratio(Counter(item.source for item in recent)),
            },
            "requests": sum(statuses.values()),
            "statuses": statuses,
            "sources": sources,
            "refusals": refusals,
            "tokens": tokens,
            "hit_ratio": hit_ratio(sources),
            **self._versions_shown(versions),
            "cache": dict(self._cache()) if self._cache else None,
        }

    def flush(self) -> None:
        """Hands what has come together to Ray's metrics; without Ray it is dropped."""
        with self._lock:
            batch, self._batch = self._batch, Batch()
        if not ray.is_initialized():
            return
        if self._instruments is None:
            self._instruments = Instruments()
        self._add_gauges(batch)
        self._instruments.hand_over(batch)

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self.flush()
        self.flush()

    def _add_gauges(self, batch: Batch) -> None:
        own = str(os.getpid())  # of several gateways each has its own
        batch.gauges["in_flight", (own,)] = self._in_flight
        if self._cache:
            state = dict(self._cache())
            batch.gauges["breaker_open", (own,)] = {"closed": 0, "half_open": 0.5}.get(state.pop("state"), 1)
            counts = {name: value for name, value in state.items() if isinstance(value, int)}
            for name, value in counts.items():
                batch.count("cache_events", (name,), value - self._cache_before.get(name, 0))
            self._cache_before = counts
        for version in self._versions_shown({})["versions"]:
            batch.gauges["version_share", (version["digest"][:SHORT], version["role"])] = version["share"]

    def _versions_shown(self, answers: Mapping[str, int]) -> dict[str, Any]:
        """The `versions` with role, share and answers; `trouble` says why they are not known."""
        try:
            routing = self._routing() if self._routing else Routing(0, None, None, 0.0)
        except RunBroken as error:
            return {"versions": [], "trouble": str(error)}
        versions = [
            {"digest": digest, "role": role, "share": share, "answers": answers.get(digest, 0)}
            for digest, role, share in roles(routing)
        ]
        return {"versions": versions, "trouble": None}


class Measured:
    """ASGI middleware, the outermost: every request under /v1/ is counted once, however it ends."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        exchange = self._metrics.begin(scope["path"] if scope["path"] in ROUTES else "other")

        async def noted(message: Message) -> None:
            await send(message)
            exchange.take(message)

        try:
            await self._app(scope, receive, noted)
        except (ClientDisconnect, OSError):
            raise
        except Exception:
            exchange.status = 500  # also where a 200 had gone out: the client has half an answer
            raise
        finally:
            self._metrics.end(exchange)


def quantile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of the ascending values do not exceed; None of nothing."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def hit_ratio(sources: Mapping[str, int]) -> float | None:
    """The share of answers that nothing was computed for; None of nothing."""
    num = sum(sources.values())
    return (sources.get("hit", 0) + sources.get("coalesced", 0)) / num if num else None


def roles(routing: Routing) -> list[tuple[str, str, float]]:
    """(digest, role, share of traffic) of each version with a role, stable first."""
    named = (
        (routing.stable, "stable", 1 - (routing.share if routing.canary else 0.0)),
        (routing.canary, "canary", routing.share),
        (routing.previous, "previous", 0.0),
    )
    return [(digest, role, share) for digest, role, share in named if digest is not None]
