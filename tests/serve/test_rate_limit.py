import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from serve.cache.redis_link import RedisLink
from serve.cache.redis_server import EmbeddedServer
from serve.config import CacheConfig, GatewayConfig
from serve.gateway import rate_limit
from serve.gateway.rate_limit import RateLimiter

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(CacheConfig())
    yield server
    server.close()


@asynccontextmanager
async def limited(
    server: EmbeddedServer | None, per_minute: float, burst: int, **changes: object
) -> AsyncIterator[RateLimiter]:
    """A limiter; without a server, one of this process alone."""
    config = GatewayConfig(requests_per_minute=per_minute, burst=burst)
    if server is None:
        yield RateLimiter(config, None, "grpo")
        return
    async with Redis.from_url(server.url) as client:
        await client.flushall()
    link = RedisLink(CacheConfig.model_validate({"timeout_s": 1.0, **changes}), server.url)
    yield RateLimiter(config, link, "grpo")
    await link.aclose()


def crowded(times_s: list[float], burst: int, rate: float) -> list[tuple[float, int]]:
    """Windows between two admissions, both included, that hold more than burst + rate * length."""
    pairs = [(times_s[j] - times_s[i], j - i + 1) for i in range(len(times_s)) for j in range(i, len(times_s))]
    return [(length, count) for length, count in pairs if count > burst + rate * length + 1e-6]


@pytest.fixture(params=["redis", "local"])
def place(request: pytest.FixtureRequest, server: EmbeddedServer) -> EmbeddedServer | None:
    return server if request.param == "redis" else None


def test_no_limit_admits_everyone(place):
    async def main() -> None:
        async with limited(place, per_minute=0, burst=1) as limiter:
            assert {tuple(await limiter.admit("acme")) for _ in range(100)} == {(True, 0.0)}

    asyncio.run(main())


def test_a_burst_passes_then_the_steady_rate_and_each_tenant_has_its_own(place):
    async def main() -> None:
        async with limited(place, per_minute=60, burst=5) as limiter:
            answers = [await limiter.admit("acme") for _ in range(8)]
            assert [answer.allowed for answer in answers] == [True] * 5 + [False] * 3
            assert all(0.5 < answer.retry_after_s <= 1.0 for answer in answers[5:])  # one a second
            assert (await limiter.admit("umbrella")).allowed

    asyncio.run(main())


def test_who_waits_as_told_is_admitted_and_refusals_cost_nothing(place):
    async def main() -> None:
        async with limited(place, per_minute=600, burst=2) as limiter:
            for _ in range(2):
                assert (await limiter.admit("acme")).allowed
            for _ in range(5):
                refused = await limiter.admit("acme")
                assert not refused.allowed
                await limiter.admit("acme")
                await asyncio.sleep(refused.retry_after_s + 0.002)
                assert (await limiter.admit("acme")).allowed

    asyncio.run(main())


def test_no_window_holds_more_than_the_burst_and_the_rate_whoever_asks(place):
    async def main() -> None:
        async with limited(place, per_minute=3000, burst=7) as limiter:
            admitted: list[tuple[float, float]] = []

            async def hammer() -> None:
                while time.monotonic() < end:
                    asked = time.monotonic()
                    if (await limiter.admit("acme")).allowed:
                        admitted.append((asked, time.monotonic()))
                    await asyncio.sleep(0)

            start = time.monotonic()
            end = start + 1.0
            await asyncio.gather(*(hammer() for _ in range(8)))
            admitted.sort()
            # The decision fell between asking and answer, so a window is at most from the first asking to the last
            # answer: 7 and 50 a second.
            spans = [
                (max(answer for _, answer in admitted[i : j + 1]) - admitted[i][0], j - i + 1)
                for i in range(len(admitted))
                for j in range(i, len(admitted))
            ]
            assert [(length, count) for length, count in spans if count > 7 + 50 * length + 1e-6] == []
            assert len(admitted) >= 40  # nor is anyone starved: 57 are due

    asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(
    steps_s=st.lists(st.floats(0, 3), min_size=1, max_size=80),
    burst=st.integers(1, 6),
    per_minute=st.sampled_from([7.0, 60.0, 601.3]),
)
def test_a_local_bucket_admits_no_more_than_promised_over_any_steps_of_the_clock(steps_s, burst, per_minute):
    now_s = 1000.0
    limiter = RateLimiter(GatewayConfig(requests_per_minute=per_minute, burst=burst), None, "grpo")
    admitted: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rate_limit, "_now_us", lambda: now_s * 1e6)
        for step_s in steps_s:
            now_s += step_s
            if asyncio.run(limiter.admit("acme")).allowed:
                admitted.append(now_s)
    assert admitted
    assert crowded(admitted, burst, per_minute / 60) == []


def test_all_gateways_together_have_one_bucket_and_it_goes_when_it_is_full_again(server):
    async def main() -> None:
        async with limited(server, per_minute=600, burst=4) as one, limited(server, per_minute=600, burst=4) as other:
            answers = [(await gateway.admit("acme")).allowed for gateway in (one, other) * 4]
            assert answers == [True] * 4 + [False] * 4
            async with Redis.from_url(server.url) as client:
                assert 0 < await client.pttl("grpo:rate:acme") <= 400  # 4 requests at 10 a second
                await asyncio.sleep(0.45)
                assert await client.keys() == []

    asyncio.run(main())


@pytest.mark.parametrize("spoilt", ["words", "nan", "inf", "-inf", "9e99", "", "a list"])
def test_a_spoilt_bucket_locks_nobody_out_longer_than_an_empty_one(server, spoilt):
    async def main() -> None:
        async with limited(server, per_minute=600, burst=2) as limiter, Redis.from_url(server.url) as client:
            if spoilt == "a list":
                await client.lpush("grpo:rate:acme", "x")
            else:
                await client.set("grpo:rate:acme", spoilt)
            first = await limiter.admit("acme")
            assert first.allowed or first.retry_after_s <= 0.1
            await asyncio.sleep(0.11)
            assert (await limiter.admit("acme")).allowed
            assert limiter._link is not None
            assert limiter._link.num_errors == 0

    asyncio.run(main())


def test_redis_going_away_gives_nobody_a_second_burst_and_holds_nobody_up():
    server = EmbeddedServer(CacheConfig())

    async def main() -> None:
        async with limited(server, per_minute=60, burst=5, timeout_s=0.05, breaker_cooldown_s=0.2) as limiter:
            assert [(await limiter.admit("acme")).allowed for _ in range(4)] == [True] * 4
            os.kill(server.pid, signal.SIGSTOP)
            started = time.monotonic()
            answers = [(await limiter.admit("acme")).allowed for _ in range(200)]
            assert time.monotonic() - started < 0.9  # three waits of 0.05 s, then none; and before a second is over
            assert answers == [True] + [False] * 199
            os.kill(server.pid, signal.SIGCONT)
            assert limiter._link is not None
            while limiter._link.breaker.state != "closed":
                await asyncio.sleep(0.05)
            num_away = limiter._link.num_bypasses
            await limiter.admit("umbrella")
            assert limiter._link.num_bypasses == num_away  # Redis decides again

    asyncio.run(main())
    server.close()
