"""The way to Redis that never raises and never holds anyone up: one client, one time limit, one breaker.

Shared by the response cache and the rate limits of a process, so that what one of them learns about Redis, both know.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import Redis, Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from core.errors import UserError
from serve.cache.breaker import Breaker
from serve.config import CacheConfig

MAX_CONNECTIONS = 32
LATE_PROBE_S = 10.0  # a probe that got no answer in time is left alone this long
STALL_S = 0.02  # a timer that goes off this late says that this process stood still
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")

Result = TypeVar("Result")


class RedisLink:
    """A client of one Redis for one event loop. Redis may be down, also at the start."""

    def __init__(self, config: CacheConfig, url: str) -> None:
        """UserError where the url is of no known kind."""
        self._config = config
        self._client, self._sentinels = _clients(url, config.timeout_s)
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)  # waiting for a connection falls under the time limit
        self._recovery: asyncio.Task[None] | None = None
        self.breaker = Breaker(config.breaker_failures, _shown(url))
        self.num_errors = self.num_timeouts = self.num_bypasses = 0  # commands

    async def run(self, action: Callable[[Redis], Awaitable[Result]]) -> Result | None:
        """What the action's commands gave; None where Redis did not answer as it should or was not asked.

        Waits for: Redis, at most timeout_s for all of the action, not counting time in which this process stood still.
        A command that is cut off closes its connection, so its late reply is never read as the answer to another one.
        """
        if self.breaker.state != "closed":
            self.num_bypasses += 1
            return None
        loop = asyncio.get_running_loop()
        limit, due = asyncio.timeout(None), loop.time() + self._config.timeout_s
        timer = loop.call_at(due, self._expire, limit, due)
        try:
            async with limit, self._free:
                result = await action(self._client)
        except TimeoutError:
            self.num_timeouts += 1
            if loop.time() - (limit.when() or 0.0) < STALL_S:  # else nothing is known about Redis
                self._failed(f"no answer within {self._config.timeout_s:g} s")
            return None
        except Exception as error:  # whatever a server that is none makes the parser raise
            self.num_errors += 1
            self._failed(described(error))
            return None
        finally:
            timer.cancel()
        self.breaker.succeeded()
        return result

    async def aclose(self) -> None:
        """Waits for: the connections' end, at most timeout_s; a frozen server does not confirm it."""
        if self._recovery:
            self._recovery.cancel()
        with suppress(Exception):
            async with asyncio.timeout(self._config.timeout_s):
                await asyncio.gather(*(client.aclose() for client in (self._client, *self._sentinels)))

    def _expire(self, limit: asyncio.Timeout, due: float) -> None:
        """Ends a wait; one that is found overdue gets its time anew, once.

        Then it was this process that stood still, on a busy machine for more than timeout_s at times, and the answer
        may lie in the socket unread: reported as a failure of Redis, that would open the breaker just under load.
        """
        now = asyncio.get_running_loop().time()
        limit.reschedule(now if now - due < STALL_S else now + self._config.timeout_s)

    def _failed(self, reason: str) -> None:
        if self.breaker.failed(reason):
            self._recovery = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        """Probes once per breaker_cooldown_s until Redis takes a write in time; no caller waits for it.

        A probe without an answer is not cancelled at once: cancelling does not end the thread of a name lookup that
        hangs, and such threads must not pile up.
        """
        while self.breaker.state != "closed":
            await asyncio.sleep(self._config.breaker_cooldown_s)
            self.breaker.probing()
            probe = asyncio.create_task(self._probe())
            try:
                await asyncio.wait({probe}, timeout=self._config.timeout_s)
                self.breaker.probed(probe.done() and probe.result())
                await asyncio.wait({probe}, timeout=LATE_PROBE_S)
            finally:
                probe.cancel()

    async def _probe(self) -> bool:
        """A write: a full server or a read-only replica answers reads, and would open the breaker again at once."""
        with suppress(Exception):
            return bool(await self._client.set(f"{self._config.namespace}:probe", b"", px=1000))
        return False


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _clients(url: str, timeout_s: float) -> tuple[Redis, list[Redis]]:
    """The client of the server, and those of the sentinels that say where it is."""
    parts = _parts(url)
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),  # the next request is the next try
        "protocol": 2,  # no handshake before the first command
        "driver_info": None,
        "max_connections": MAX_CONNECTIONS,
        "socket_timeout": None,  # run() limits the whole action
        "socket_connect_timeout": None,
    }
    try:
        if parts.scheme == "redis+sentinel":
            return _behind_sentinels(parts, options, timeout_s)
        return Redis.from_url(url, **options), []
    except ValueError as error:
        raise UserError(f"cache.redis_url must be a Redis URL, got {_shown(url)}: {error}") from None


def _behind_sentinels(parts: SplitResult, options: dict[str, Any], timeout_s: float) -> tuple[Redis, list[Redis]]:
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it must name the service, as in redis+sentinel://host:26379,host2:26379/service/0")
    sentinels = [(address.hostname, address.port or SENTINEL_PORT) for address in map(_address, hosts.split(","))]
    # A sentinel that is frozen must leave time to ask the next one, and then the server.
    own_share = {"socket_timeout": timeout_s / (len(sentinels) + 1)}
    asking = {**options, **own_share, "socket_connect_timeout": own_share["socket_timeout"]}
    login_options = {"username": unquote(user) or None, "password": unquote(password) or None}
    manager = Sentinel(sentinels, sentinel_kwargs=asking, **options, **login_options, db=int(database or 0))
    return manager.master_for(unquote(service)), manager.sentinels


def _address(host: str) -> SplitResult:
    address = urlsplit(f"//{host}")
    if not address.hostname:
        raise ValueError("each sentinel must be host:port")
    return address


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise UserError(f"cache.redis_url must be a URL, got one that cannot be read: {error}") from None
    if parts.scheme not in SCHEMES:
        raise UserError(
            f"cache.redis_url must start with {', '.join(f'{scheme}://' for scheme in SCHEMES)}, got {_shown(url)}"
        )
    return parts


def _shown(url: str) -> str:
    """The url without passwords, for people."""
    parts = urlsplit(url)
    return f"{parts.scheme or '?'}://{parts.netloc.rpartition('@')[2]}{parts.path}"
