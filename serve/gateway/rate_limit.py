"""Rate limits: a token bucket a tenant, in Redis for all gateways together, in this process while Redis is away.

A bucket is one number, the time at which it will be full again (GCRA): with `interval` between steady requests, a
request is allowed while that time is at most (burst - 1) intervals ahead, and moves it ahead by one. So no window of
t seconds holds more than burst + t / interval of them.
"""

import math
import time
from functools import partial
from typing import NamedTuple

from redis.asyncio import Redis

from serve.cache.redis_link import RedisLink
from serve.config import GatewayConfig

# KEYS[1]: the bucket; ARGV: interval and burst * interval, in us. Answers {allowed, us to wait, us ahead}. By the
# server's clock, the one that all gateways share; where it has jumped back, a bucket is never worse than empty.
TAKE = """
local clock = redis.call('time')
local now = clock[1] * 1000000 + clock[2]
local interval, depth = tonumber(ARGV[1]), tonumber(ARGV[2])
local found = redis.pcall('get', KEYS[1])
local full_at = type(found) == 'string' and tonumber(found) or now
if not (full_at > now) then full_at = now end
if full_at > now + depth then
  full_at = now + depth
  redis.call('set', KEYS[1], string.format('%.0f', full_at), 'PX', math.ceil(depth / 1000))
end
local ahead = full_at - now + interval
if ahead > depth then return {0, ahead - depth, ahead - interval} end
redis.call('set', KEYS[1], string.format('%.0f', now + ahead), 'PX', math.ceil(ahead / 1000))
return {1, 0, ahead}
"""


class Admission(NamedTuple):
    allowed: bool
    retry_after_s: float  # 0 where allowed


class RateLimiter:
    """The limit that every tenant has. Without a link, each gateway limits by itself."""

    def __init__(self, config: GatewayConfig, link: RedisLink | None, namespace: str) -> None:
        self._link, self._namespace = link, namespace
        rate = config.requests_per_minute
        self._interval_us = math.ceil(60e6 / rate) if rate else 0  # whole: Redis keeps whole microseconds
        self._depth_us = config.burst * self._interval_us
        self._full_at_us: dict[str, float] = {}  # tenant -> by this process's clock

    async def admit(self, tenant: str) -> Admission:
        """Whether the tenant may send a request now, and if not, in how many seconds; never raises.

        Waits for: Redis, at most its time limit; then this process decides by what it has seen itself.
        """
        if not self._interval_us:
            return Admission(True, 0.0)
        taken = await self._link.run(partial(self._take, f"{self._namespace}:rate:{tenant}")) if self._link else None
        if taken is None:
            return self._take_here(tenant)
        allowed, wait_us, ahead_us = taken
        self._full_at_us[tenant] = _now_us() + ahead_us  # Redis going away gives nobody a second burst here
        return Admission(bool(allowed), wait_us / 1e6)

    async def _take(self, name: str, client: Redis) -> tuple[int, int, int]:
        allowed, wait_us, ahead_us = await client.eval(TAKE, 1, name, self._interval_us, self._depth_us)
        return int(allowed), int(wait_us), int(ahead_us)

    def _take_here(self, tenant: str) -> Admission:
        now = _now_us()
        ahead = max(0.0, self._full_at_us.get(tenant, now) - now) + self._interval_us
        if ahead > self._depth_us:
            return Admission(False, (ahead - self._depth_us) / 1e6)
        self._full_at_us[tenant] = now + ahead
        return Admission(True, 0.0)


def _now_us() -> float:
    return time.monotonic() * 1e6
