"""The cache under everything a Redis can do wrong: no call raises or waits, and it works again by itself."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest
from redis.asyncio import Redis

from serve.cache.redis_link import MAX_CONNECTIONS
from serve.cache.redis_server import EmbeddedServer
from serve.config import CacheConfig
from tests.serve import servers
from tests.serve.outages import BUSY_S, bears_an_outage, opened, timed, works_again
from tests.serve.servers import free_port, lying_server, redis_server

pytestmark = pytest.mark.process


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(CacheConfig())
    yield server
    with suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGCONT)
    server.close()


LIES = [servers.stay_silent, servers.hang_up, servers.speak_http, servers.lie_about_sizes]
LIES += [servers.answer_with_numbers, servers.trickle]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_no_server_that_is_none_raises_or_holds_anyone_up(lie, tmp_path, caplog):
    async def main() -> None:
        with ExitStack() as stack:
            port = stack.enter_context(lying_server(lie))
            async with opened(f"redis://127.0.0.1:{port}") as cache:
                await bears_an_outage(cache, caplog)
                stack.close()
                with redis_server(tmp_path, port=port):
                    await works_again(cache)
                assert cache.state.opens == 1
                assert "cache back" in caplog.records[-1].message

    asyncio.run(main())


def test_it_starts_and_serves_with_redis_down_and_takes_to_it_when_it_comes(tmp_path, caplog):
    async def main() -> None:
        port = free_port()
        async with opened(f"redis://127.0.0.1:{port}") as cache:
            await bears_an_outage(cache, caplog)
            with redis_server(tmp_path, port=port):
                await works_again(cache)

    asyncio.run(main())


def test_a_frozen_server_holds_up_nobody_and_is_used_again_when_it_wakes(server, caplog):
    async def main() -> None:
        async with opened(server.url) as cache:
            await works_again(cache)
            os.kill(server.pid, signal.SIGSTOP)
            await bears_an_outage(cache, caplog)
            os.kill(server.pid, signal.SIGCONT)
            await works_again(cache)

    asyncio.run(main())


def test_a_claim_taken_while_its_caller_thought_redis_away_is_taken_back(server):
    async def main() -> None:
        async with opened(server.url, breaker_failures=1000) as cache, opened(server.url, timeout_s=1.0) as other:
            await works_again(cache)
            os.kill(server.pid, signal.SIGSTOP)
            assert await asyncio.gather(*(cache.claim(str(i)) for i in range(5))) == [None] * 5
            leaving = asyncio.create_task(cache.claim("5"))
            await asyncio.sleep(0.01)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            os.kill(server.pid, signal.SIGCONT)
            for i in range(6):
                token, deadline = None, time.monotonic() + 10.0  # where a claim of nobody would stand for 30 s
                while not token:
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.05)
                    token = await other.claim(str(i))

    asyncio.run(main())


def test_two_hundred_at_once_leave_a_frozen_server_in_time_and_leak_no_connection(server):
    async def main() -> None:
        async with opened(server.url, timeout_s=0.25) as cache:
            await works_again(cache)
            os.kill(server.pid, signal.SIGSTOP)
            for _ in range(3):
                answers = await asyncio.gather(*(timed(cache.get(str(i))) for i in range(200)))
                assert {value for value, _ in answers} == {None}
                assert max(waited_s for _, waited_s in answers) < 2 * 0.25 + BUSY_S
            assert cache.state.state != "closed"
            to_server = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == server.port]
            assert len(to_server) <= 1  # the probe's
            os.kill(server.pid, signal.SIGCONT)
            await works_again(cache)
            answers = await asyncio.gather(*(timed(cache.get("again")) for _ in range(200)))
            to_server = [c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == server.port]
            assert 0 < len([c for c in to_server if c.status == "ESTABLISHED"]) <= MAX_CONNECTIONS

    asyncio.run(main())


def test_more_callers_than_connections_share_a_healthy_server(server):
    async def main() -> None:
        async with opened(server.url, timeout_s=1.0) as cache:
            await cache.put("key", b"value")
            assert set(await asyncio.gather(*(cache.get("key") for _ in range(400)))) == {b"value"}

    asyncio.run(main())


def test_a_late_reply_is_never_the_answer_to_another_question(server):
    async def main() -> None:
        async with opened(server.url, timeout_s=0.1, breaker_failures=1000) as cache:
            for i in range(30):
                await cache.put(str(i), b"answer %d" % i)
            async with Redis.from_url(server.url) as admin:
                for round_ in range(10):
                    await admin.client_pause(130, all=True)  # so replies come just after callers have left
                    keys = [str((round_ + i) % 30) for i in range(20)]
                    answers = await asyncio.gather(*(cache.get(key) for key in keys))
                    await asyncio.sleep(0.05)
                    answers += await asyncio.gather(*(cache.get(key) for key in keys))
                    for key, answer in zip(keys * 2, answers, strict=True):
                        assert answer in (None, b"answer %s" % key.encode())
            assert cache.state.timeouts >= 50
            assert cache.state.hits >= 50
            assert cache.state.corrupt == 0  # entries are checked against their key, so it would count here

    asyncio.run(main())


def test_a_process_that_stood_still_does_not_blame_redis(server):
    async def main() -> None:
        async with opened(server.url, timeout_s=1.0) as writing:
            await works_again(writing)
        for _ in range(5):
            async with opened(server.url, breaker_failures=1, timeout_s=0.1) as cache:
                reading = asyncio.create_task(cache.get("again"))
                await asyncio.sleep(0)  # it connects; the command and the reply need several turns of the loop more
                time.sleep(0.3)  # three times what they may take, in which nobody turns it
                assert await reading == b"works"
                assert cache.state.opens == 0

    asyncio.run(main())


def test_a_restart_between_requests_costs_no_outage(server):
    async def main() -> None:
        async with opened(server.url, timeout_s=1.0) as cache:
            await asyncio.gather(*(cache.put(str(i), b"x") for i in range(40)))
            await asyncio.to_thread(server.restart)
            assert set(await asyncio.gather(*(cache.get(str(i)) for i in range(40)))) == {None}
            assert (cache.state.errors, cache.state.opens) == (0, 0)
            await works_again(cache)

    asyncio.run(main())


def test_a_server_that_dies_under_load_costs_misses_only(server, caplog):
    async def main() -> None:
        async with opened(server.url) as cache:
            await cache.put("key", b"value")
            answers: set[object] = set()
            longest_s = 0.0

            async def load() -> None:
                nonlocal longest_s
                while not done.is_set():
                    answer, waited_s = await timed(cache.get("key"))
                    answers.add(answer)
                    longest_s = max(longest_s, waited_s)
                    await asyncio.sleep(0.001)

            done = asyncio.Event()
            loads = [asyncio.create_task(load()) for _ in range(16)]
            await asyncio.sleep(0.1)
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.sleep(0.3)
            assert cache.state.state != "closed"
            await asyncio.to_thread(server.restart)
            await works_again(cache)
            done.set()
            await asyncio.gather(*loads)
            assert answers == {None, b"value"}
            assert longest_s < 0.05 + BUSY_S
            assert len([record for record in caplog.records if record.name.startswith("serve")]) == 2

    asyncio.run(main())
