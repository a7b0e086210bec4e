"""What every outage of Redis is held to: no call raises or waits, few try, one line is logged, it ends by itself."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from serve.cache.responses import ResponseCache
from serve.config import CacheConfig

BUSY_S = 0.4  # what a busy machine may add to a wait


@asynccontextmanager
async def opened(url: str, **changes: object) -> AsyncIterator[ResponseCache]:
    cache = ResponseCache(CacheConfig.model_validate({"breaker_cooldown_s": 0.3, **changes}), url)
    try:
        yield cache
    finally:
        await cache.aclose()


async def timed(call: Awaitable[object]) -> tuple[object, float]:
    started = time.monotonic()
    return await call, time.monotonic() - started


async def works_again(cache: ResponseCache, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        await cache.put("again", b"works")
        if await cache.get("again") == b"works":
            return
        assert time.monotonic() < deadline, cache.state
        await asyncio.sleep(0.05)


async def bears_an_outage(cache: ResponseCache, caplog: pytest.LogCaptureFixture) -> None:
    """Twenty requests, four at a time: none raises, none waits, one line is logged, and most do not even try."""
    caplog.clear()

    async def request(i: int) -> None:
        value, waited_s = await timed(cache.get(str(i)))
        assert value is None
        token, claimed_s = await timed(cache.claim(str(i)))
        assert token is None
        other, other_s = await timed(cache.await_other(str(i)))
        assert other is None
        _, put_s = await timed(cache.put(str(i), b"answer"))
        assert max(waited_s, claimed_s, other_s, put_s) < 0.05 + BUSY_S

    for first in range(0, 20, 4):
        await asyncio.gather(*(request(i) for i in range(first, first + 4)))
    assert cache.state.state in ("open", "half_open")
    assert cache.state.bypasses >= 40  # of 80 calls; three failures in a row open the breaker
    assert cache.state.opens == 1
    assert [record.levelno for record in caplog.records if record.name.startswith("serve")] == [logging.WARNING]
