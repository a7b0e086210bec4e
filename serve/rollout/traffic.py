"""What gateways tell about versions: requests, errors, times to first token, answers under way; added up by digest.

A gateway reports its totals since it started, not what is new: a report that is lost, late or sent twice costs nothing,
and a board that was started again knows everything once each gateway has reported.
"""

import asyncio
import bisect
import itertools
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BOARD = "traffic-board"  # the actor's name
BUCKETS_PER_DECADE = 50  # an edge is 4.7 % above the one before
EDGES_S = tuple(
    10.0 ** (index / BUCKETS_PER_DECADE - 3) for index in range(5 * BUCKETS_PER_DECADE + 1)
)  # 1 ms to 100 s
NUM_BUCKETS = len(EDGES_S) + 1  # bucket b ends with EDGES_S[b], which is in it; the last has what is above 100 s
GONE_S = 10.0  # silence after which a gateway has ended, and its answers with it
CALL_LIMIT_S = 5.0  # one call of the board

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VersionTraffic:
    """The answers of one version, counted."""

    num_requests: int = 0
    num_errors: int = 0
    ttft_counts: tuple[int, ...] = (0,) * NUM_BUCKETS  # [NUM_BUCKETS] times to first token

    def __add__(self, other: "VersionTraffic") -> "VersionTraffic":
        counts = tuple(map(int.__add__, self.ttft_counts, other.ttft_counts))
        return VersionTraffic(self.num_requests + other.num_requests, self.num_errors + other.num_errors, counts)

    def minus(self, earlier: "VersionTraffic") -> "VersionTraffic":
        """What came after `earlier`, totals of the same version; see `holds`."""
        counts = tuple(map(int.__sub__, self.ttft_counts, earlier.ttft_counts))
        return VersionTraffic(self.num_requests - earlier.num_requests, self.num_errors - earlier.num_errors, counts)

    def holds(self, earlier: "VersionTraffic") -> bool:
        """Whether `earlier` is a part of this; False: counts were lost in between, with a board and a gateway."""
        rest = self.minus(earlier)
        return min(rest.num_requests, rest.num_errors, *rest.ttft_counts) >= 0

    def p(self, quantile: float) -> float | None:
        """The time to first token in seconds that this share of answers met: the upper edge of its bucket.

        None without any; infinite above 100 s.
        """
        bucket = self.bucket_of(quantile)
        return None if bucket is None else (*EDGES_S, math.inf)[bucket]

    def bucket_of(self, quantile: float) -> int | None:
        """Where the quantile of the times to first token lies; None without any."""
        num = sum(self.ttft_counts)
        reached = itertools.accumulate(self.ttft_counts)
        return next((bucket for bucket, count in enumerate(reached) if count >= quantile * num), None) if num else None


@dataclass(frozen=True)
class Report:
    """What one gateway has seen since it started."""

    gateway: str  # another each time a gateway starts
    sequence: int  # rises with each report
    totals: dict[str, VersionTraffic]  # by digest
    in_flight: dict[str, int]  # by digest; none is left out


@dataclass
class _Counts:
    num_requests: int = 0
    num_errors: int = 0
    ttft_counts: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)


class TrafficLog:
    """A gateway's own counts. For one event loop: it has no lock."""

    def __init__(self) -> None:
        self.gateway = uuid.uuid4().hex
        self._sequence = 0
        self._counts: dict[str, _Counts] = {}
        self._in_flight: Counter[str] = Counter()

    def begin(self, digest: str) -> None:
        """An answer by this version is under way: to be called with no await after the version was chosen."""
        self._in_flight[digest] += 1

    def end(self, digest: str) -> None:
        """It is not any more, however it ended; once for each `begin`."""
        self._in_flight[digest] -= 1

    def record(self, digest: str, ttft_s: float | None, is_error: bool) -> None:
        """Counts an answer that the version computed.

        Answers of the cache, refusals of a client's mistake and answers that the client gave up say nothing about a
        version: they are not recorded. ttft_s None: there was no first token.
        """
        counts = self._counts.setdefault(digest, _Counts())
        counts.num_requests += 1
        counts.num_errors += is_error
        if ttft_s is not None:
            counts.ttft_counts[bisect.bisect_left(EDGES_S, ttft_s)] += 1

    def report(self) -> Report:
        """The totals so far."""
        self._sequence += 1
        totals = {
            digest: VersionTraffic(counts.num_requests, counts.num_errors, tuple(counts.ttft_counts))
            for digest, counts in self._counts.items()
        }
        return Report(self.gateway, self._sequence, totals, dict(+self._in_flight))


@dataclass(frozen=True)
class _Heard:
    report: Report
    at: float  # by the board's clock
    taken_after: float  # the report before this one had come by then, and a gateway sends one at a time


class TrafficBoard:
    """The newest report of each gateway. Whoever starts serving makes it an actor named BOARD."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, _Heard] = {}

    def report(self, report: Report) -> None:
        """Takes a gateway's totals, unless newer ones are here."""
        before = self._heard.get(report.gateway)
        if before is None or before.report.sequence < report.sequence:
            self._heard[report.gateway] = _Heard(report, self._clock(), before.at if before else -math.inf)

    def traffic(self, digest: str) -> VersionTraffic:
        """The totals of a version over all gateways, those that have ended too."""
        none = VersionTraffic()
        return sum((heard.report.totals.get(digest, none) for heard in self._heard.values()), none)

    def in_flight(self, digest: str, within_s: float) -> int | None:
        """Answers by a version under way, as counted within the last `within_s` seconds by every gateway.

        None where a gateway that has not ended has not reported such a count yet.
        """
        now = self._clock()
        alive = [heard for heard in self._heard.values() if now - heard.at < GONE_S]
        if any(heard.taken_after < now - within_s for heard in alive):
            return None
        return sum(heard.report.in_flight.get(digest, 0) for heard in alive)


async def report_forever(log: TrafficLog, find_board: Callable[[], Any], interval_s: float = 1.0) -> None:
    """Reports to the board's actor for as long as the gateway lives; ends by being cancelled, never by an error.

    find_board() returns the actor's handle, as ray.get_actor does, and may block: it is called in a thread, first and
    after each failure. Waits for: the actor, at most CALL_LIMIT_S; meanwhile the log goes on counting.
    """
    board: Any = None
    was_lost = False
    while True:
        try:
            board = board or await asyncio.to_thread(find_board)
            await asyncio.wait_for(board.report.remote(log.report()), CALL_LIMIT_S)
            was_lost = False
        except Exception as error:
            if not was_lost:
                _logger.warning(
                    "the traffic board must take reports, got %s: %s; trying on", type(error).__name__, error
                )
            board, was_lost = None, True
        await asyncio.sleep(interval_s)
