import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from serve.cache.redis_server import EmbeddedServer
from serve.cache.responses import FRAME_BYTES, ResponseCache
from serve.config import CacheConfig
from tests.serve.servers import redis_server

pytestmark = pytest.mark.process
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["valkey", "redis"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the embedded Valkey, and of Debian's Redis."""
    if request.param == "valkey":
        server = EmbeddedServer(CacheConfig())
        yield server.url
        server.close()
    else:
        with redis_server(tmp_path_factory.mktemp("redis")) as (port, _):
            yield f"redis://127.0.0.1:{port}"


@asynccontextmanager
async def opened(url: str, **changes: object) -> AsyncIterator[tuple[ResponseCache, "Redis"]]:
    """An empty cache that waits long, for a busy machine, and a client that sees what it does."""
    cache = ResponseCache(CacheConfig.model_validate({"timeout_s": 1.0, **changes}), url)
    try:
        async with Redis.from_url(url) as client:
            await client.flushall()
            yield cache, client
    finally:
        await cache.aclose()


def test_a_value_comes_back_byte_for_byte_and_only_under_its_key(url):
    async def main() -> None:
        async with opened(url) as (cache, _):
            values = {"a": b"", "b": bytes(range(256)) * 40, "c": b"\r\n$-1\r\n"}
            assert [await cache.get(key) for key in values] == [None] * 3
            for key, value in values.items():
                await cache.put(key, value)
            assert {key: await cache.get(key) for key in values} == values
            await cache.put("a", b"another")
            assert await cache.get("a") == b"another"
            assert await cache.get("d") is None
            state = cache.state
            assert (state.hits, state.misses, state.state) == (4, 4, "closed")
            assert (state.errors, state.timeouts, state.bypasses, state.corrupt, state.oversized) == (0, 0, 0, 0, 0)

    asyncio.run(main())


def test_another_namespace_is_another_cache(url):
    async def main() -> None:
        async with opened(url, namespace="one") as (one, _):
            await one.put("key", b"of one")
            other = ResponseCache(CacheConfig(timeout_s=1.0, namespace="other"), url)
            assert await other.get("key") is None
            await other.aclose()

    asyncio.run(main())


def test_values_live_about_as_long_as_asked_and_do_not_end_together(url):
    async def main() -> None:
        async with opened(url, ttl_s=100, ttl_jitter=0.2) as (cache, client):
            for i in range(50):
                await cache.put(str(i), b"x")
            left_s = [await client.pttl(name) / 1000 for name in await client.keys("grpo:answer:*")]
            assert len(left_s) == 50
            assert 75 < min(left_s) < 95  # 100 +- 20, and 50 draws
            assert 105 < max(left_s) <= 120

    asyncio.run(main())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda framed: framed[:-1],
        lambda framed: framed + b"x",
        lambda framed: framed[:FRAME_BYTES],
        lambda framed: framed[:3],
        lambda framed: framed[:-1] + bytes([framed[-1] ^ 1]),
        lambda framed: b"GRC0" + framed[4:],
        lambda framed: b'{"choices": []}',
    ],
    ids=["cut", "longer", "empty", "torn", "one bit", "older form", "foreign"],
)
def test_an_entry_that_is_not_what_was_put_is_a_miss_and_goes(url, spoil):
    async def main() -> None:
        async with opened(url) as (cache, client):
            await cache.put("key", b"the answer")
            name = (await client.keys())[0]
            await client.set(name, spoil(await client.get(name)))
            assert await cache.get("key") is None
            assert (cache.state.corrupt, cache.state.errors, await client.keys()) == (1, 0, [])
            await cache.put("key", b"the answer")
            assert await cache.get("key") == b"the answer"

    asyncio.run(main())


def test_an_entry_of_another_key_or_type_is_a_miss_and_goes(url):
    async def main() -> None:
        async with opened(url) as (cache, client):
            await cache.put("a", b"of a")
            await client.copy("grpo:answer:a", "grpo:answer:b")
            await client.lpush("grpo:answer:c", "a list")
            assert [await cache.get(key) for key in "abc"] == [b"of a", None, None]
            assert (cache.state.corrupt, cache.state.errors) == (2, 0)
            assert await client.keys() == [b"grpo:answer:a"]

    asyncio.run(main())


def test_values_above_the_bound_are_not_kept_and_foreign_giants_not_read(url):
    async def main() -> None:
        async with opened(url, max_value_bytes=2048) as (cache, client):
            await cache.put("fits", b"x" * 2048)
            await cache.put("large", b"x" * 2049)
            assert len(await cache.get("fits") or b"") == 2048
            assert await client.keys() == [b"grpo:answer:fits"]
            await client.set("grpo:answer:giant", b"x" * (8 << 20))
            sent_before = (await client.info("stats"))["total_net_output_bytes"]
            assert await cache.get("giant") is None
            assert (await client.info("stats"))["total_net_output_bytes"] - sent_before < 1 << 20  # of 8 MiB
            assert (cache.state.oversized, await client.exists("grpo:answer:giant")) == (2, 0)

    asyncio.run(main())


def test_one_of_many_gets_the_claim_and_only_its_owner_ends_it(url):
    async def main() -> None:
        async with opened(url, lease_s=50) as (cache, client):
            tokens = await asyncio.gather(*(cache.claim("key") for _ in range(40)))
            (token,) = [token for token in tokens if token]
            await cache.release("key", "not the token")
            assert await cache.claim("key") is None
            assert 40_000 < await client.pttl("grpo:claim:key") <= 50_000
            await cache.release("key", token)
            assert await cache.claim("key") is not None

    asyncio.run(main())


def test_a_claim_ends_with_its_time(url):
    async def main() -> None:
        async with opened(url, lease_s=0.1) as (cache, _):
            old = await cache.claim("key")
            await asyncio.sleep(0.15)
            new = await cache.claim("key")
            assert old is not None
            assert new is not None
            await cache.release("key", old)  # too late: the claim is another's by now
            assert await cache.claim("key") is None

    asyncio.run(main())


def test_a_waiter_gets_the_value_of_the_claims_owner(url):
    async def main() -> None:
        async with opened(url) as (cache, _):
            token = await cache.claim("key") or ""
            waiters = [asyncio.create_task(cache.await_other("key")) for _ in range(5)]
            await asyncio.sleep(0.2)
            assert not any(waiter.done() for waiter in waiters)
            await cache.put("key", b"computed once")
            await cache.release("key", token)
            assert await asyncio.gather(*waiters) == [b"computed once"] * 5

    asyncio.run(main())


def test_a_waiter_goes_on_by_itself_when_the_owner_gives_up_or_takes_too_long(url):
    async def main() -> None:
        async with opened(url, lease_wait_s=0.4) as (cache, _):
            assert await cache.await_other("unclaimed") is None
            started = time.monotonic()
            token = await cache.claim("key") or ""
            waiter = asyncio.create_task(cache.await_other("key"))
            await asyncio.sleep(0.1)
            await cache.release("key", token)
            assert await waiter is None
            assert time.monotonic() - started < 0.4  # not the whole wait
            await cache.claim("key")
            started = time.monotonic()
            assert await cache.await_other("key") is None
            assert 0.4 <= time.monotonic() - started < 1.5

    asyncio.run(main())


def test_a_computation_of_another_process_that_is_killed_is_waited_for_no_longer_than_its_claim(url):
    claiming = (
        "import asyncio, sys, time\nfrom serve.cache.responses import ResponseCache\n"
        "from serve.config import CacheConfig\n"
        "async def main():\n"
        "    cache = ResponseCache(CacheConfig(timeout_s=1.0, lease_s=1.5), sys.argv[1])\n"
        "    print(await cache.claim('key'), flush=True)\n    time.sleep(600)\n"
        "asyncio.run(main())\n"
    )

    async def main() -> None:
        async with opened(url) as (cache, _):
            owner = subprocess.Popen(
                [sys.executable, "-c", claiming, url], cwd=PROJECT, stdout=subprocess.PIPE, text=True
            )
            try:
                assert owner.stdout is not None
                assert len((await asyncio.to_thread(owner.stdout.readline)).strip()) == 16
                assert await cache.claim("key") is None
            finally:
                owner.kill()
                owner.communicate()
            started = time.monotonic()
            assert await cache.await_other("key") is None
            assert time.monotonic() - started < 3.0  # of lease_wait_s 10
            assert await cache.claim("key") is not None

    asyncio.run(main())
