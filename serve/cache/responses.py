"""The response cache: whole answers under their exact key, in Redis, and one computation of a key among all processes.

An optional part: whatever Redis does, no call raises, and none but `await_other` waits longer than timeout_s.
"""

import asyncio
import hashlib
import random
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from serve.cache.breaker import State
from serve.cache.redis_link import RedisLink
from serve.config import CacheConfig

MAGIC = b"GRC1"
DIGEST_BYTES = 16
FRAME_BYTES = len(MAGIC) + DIGEST_BYTES
FIRST_POLL_S = 0.02
MAX_POLL_S = 0.25
DELETE_IF_MINE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"


@dataclass(frozen=True)
class CacheState:
    """Counts since the start, for metrics."""

    state: State  # of the breaker
    hits: int
    misses: int
    errors: int  # commands, as the two below
    timeouts: int
    bypasses: int  # not sent, the breaker being open
    corrupt: int  # entries that were not what had been put; each was deleted
    oversized: int  # values refused by put, and entries found too large
    opens: int  # of the breaker


class ResponseCache:
    """The cache of one event loop. Keys are text; what a key must hold is the caller's matter."""

    def __init__(self, config: CacheConfig, url: str) -> None:
        """UserError where the url is of no known kind; a Redis that is down is none."""
        self._config = config
        self.link = RedisLink(config, url)
        self._hits = self._misses = self._corrupt = self._oversized = 0
        self._late: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> CacheState:
        link = self.link
        return CacheState(
            state=link.breaker.state,
            hits=self._hits,
            misses=self._misses,
            errors=link.num_errors,
            timeouts=link.num_timeouts,
            bypasses=link.num_bypasses,
            corrupt=self._corrupt,
            oversized=self._oversized,
            opens=link.breaker.num_opens,
        )

    async def get(self, key: str) -> bytes | None:
        """The value that was put under the key, byte for byte; None for a miss of any kind."""
        return await self.link.run(partial(self._get, self._entry(key)))

    async def put(self, key: str, value: bytes) -> None:
        """Keeps the value for about ttl_s, the jitter spreading the recomputation of values put together."""
        if len(value) > self._config.max_value_bytes:
            self._oversized += 1
            return
        name, jitter = self._entry(key), random.uniform(-1, 1) * self._config.ttl_jitter
        framed = MAGIC + _digest(name, value) + value
        await self.link.run(partial(_set, name, framed, _milliseconds(self._config.ttl_s * (1 + jitter))))

    async def claim(self, key: str) -> str | None:
        """A token: this caller is to compute the key's value, within lease_s. None: another one does, or Redis is away.

        A claim whose reply was lost may stand nevertheless; it is taken back as soon as Redis answers.
        """
        name, token = self._lease(key), secrets.token_hex(8)
        sent, granted = self.link.breaker.state == "closed", None
        try:
            granted = await self.link.run(partial(_set_new, name, token, _milliseconds(self._config.lease_s)))
        finally:
            if sent and granted is None:
                self._start(self._release_late(name, token))
        return token if granted else None

    async def release(self, key: str, token: str) -> None:
        """Ends a claim, if it is still the caller's; call it after put, and when the computation failed."""
        name, released = self._lease(key), None
        try:
            released = await self.link.run(partial(_delete_if_mine, name, token))
        finally:
            if released is None:
                self._start(self._release_late(name, token))

    async def await_other(self, key: str) -> bytes | None:
        """The value that another process is computing; None: compute it yourself.

        Waits for: the value, the end of its claim without a value, Redis being away, or lease_wait_s.
        """
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + self._config.lease_wait_s, FIRST_POLL_S
        while True:
            seen = await self.link.run(partial(self._look, self._lease(key), self._entry(key)))
            if seen is None:
                return None
            is_claimed, value = seen
            if value is not None or not is_claimed or loop.time() >= deadline:
                return value
            await asyncio.sleep(max(0.0, min(pause_s, deadline - loop.time())))
            pause_s = min(2 * pause_s, MAX_POLL_S)

    async def aclose(self) -> None:
        for task in self._late:
            task.cancel()
        await self.link.aclose()

    def _entry(self, key: str) -> str:
        return f"{self._config.namespace}:answer:{key}"

    def _lease(self, key: str) -> str:
        return f"{self._config.namespace}:claim:{key}"

    async def _get(self, name: str, client: Redis) -> bytes | None:
        value = await self._read(name, client)
        if value is None:
            self._misses += 1
        else:
            self._hits += 1
        return value

    async def _look(self, lease: str, name: str, client: Redis) -> tuple[bool, bytes | None]:
        """Whether the key is claimed, and its value: in this order, because owners put before they release."""
        is_claimed = bool(await client.exists(lease))
        return is_claimed, await self._read(name, client)

    async def _read(self, name: str, client: Redis) -> bytes | None:
        """The entry's value; None where there is none or a bad one, which is deleted."""
        longest = self._config.max_value_bytes + FRAME_BYTES
        try:
            framed = await client.getrange(name, 0, longest)  # one byte more than may be: never read a foreign giant
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            framed = b"\0"
        if not isinstance(framed, bytes):
            raise TypeError(f"GETRANGE must be answered with bytes, got {type(framed).__name__}")
        if not framed:
            return None
        value = framed[FRAME_BYTES:]
        if len(framed) > longest:
            self._oversized += 1
        elif framed[:FRAME_BYTES] == MAGIC + _digest(name, value):
            return value
        else:
            self._corrupt += 1
        await client.unlink(name)
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._late.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._late.discard)

    async def _release_late(self, lease: str, token: str) -> None:
        """Takes back a claim that may stand though nobody computes: others would wait for it until it runs out."""
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + self._config.lease_s, self._config.timeout_s
        while loop.time() < deadline:
            await asyncio.sleep(pause_s)
            if await self.link.run(partial(_delete_if_mine, lease, token)) is not None:
                return
            pause_s = min(2 * pause_s, self._config.breaker_cooldown_s)


def _digest(name: str, value: bytes) -> bytes:
    """Of the value together with its key: an entry under a wrong key is a corrupt one."""
    return hashlib.blake2b(value, digest_size=DIGEST_BYTES, key=hashlib.blake2b(name.encode()).digest()).digest()


def _milliseconds(seconds: float) -> int:
    return max(1, round(1000 * seconds))


async def _set(name: str, value: bytes, milliseconds: int, client: Redis) -> bool:
    return bool(await client.set(name, value, px=milliseconds))


async def _set_new(name: str, value: str, milliseconds: int, client: Redis) -> bool:
    return bool(await client.set(name, value, px=milliseconds, nx=True))


async def _delete_if_mine(name: str, token: str, client: Redis) -> int:
    return int(await client.eval(DELETE_IF_MINE, 1, name, token))
