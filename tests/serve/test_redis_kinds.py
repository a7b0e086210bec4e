"""The Redis servers a url may name, and those that refuse: real ones each."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from redis.asyncio import Redis

from core.errors import UserError
from serve.cache.responses import ResponseCache
from serve.config import CacheConfig
from tests.serve.outages import bears_an_outage, opened, works_again
from tests.serve.servers import ask, free_port, redis_server, wait_until

pytestmark = pytest.mark.process


def test_a_wrong_password_is_an_outage_until_it_is_right(tmp_path, caplog):
    async def main() -> None:
        with redis_server(tmp_path, "requirepass right") as (port, _):
            async with opened(f"redis://:wrong@127.0.0.1:{port}") as cache:
                await bears_an_outage(cache, caplog)
                assert "wrong" not in caplog.text.replace("WRONGPASS", "")
                ask(port, "AUTH right", "CONFIG SET requirepass wrong")
                await works_again(cache)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limit", "lift"), [("maxmemory 100kb", "CONFIG SET maxmemory 0"), ("replicaof 127.0.0.1 1", "REPLICAOF NO ONE")]
)
def test_a_server_that_takes_no_writes_is_bypassed_until_it_does(tmp_path, caplog, limit, lift):
    """Full with noeviction, or a replica: it answers reads, and a probe that reads would open and close without end."""

    async def main() -> None:
        with redis_server(tmp_path, "maxmemory-policy noeviction", limit) as (port, _):
            async with opened(f"redis://127.0.0.1:{port}") as cache:
                for i in range(4):  # in a row: nobody reads between
                    await cache.put(str(i), b"x" * 1000)
                await asyncio.sleep(1.0)  # three probes
                assert cache.state.state in ("open", "half_open")
                assert (cache.state.opens, cache.state.errors, len(caplog.records)) == (1, 3, 1)
                ask(port, lift)
                await works_again(cache)
                assert cache.state.opens == 1

    asyncio.run(main())


def test_a_unix_socket_is_a_way_too(tmp_path):
    async def main() -> None:
        with redis_server(tmp_path, f"unixsocket {tmp_path}/redis.sock"):
            async with opened(f"unix://{tmp_path}/redis.sock?db=3", timeout_s=1.0) as cache:
                await cache.put("key", b"value")
                assert await cache.get("key") == b"value"
                assert cache.state.errors == 0
            async with Redis(unix_socket_path=f"{tmp_path}/redis.sock", db=3) as client:
                assert await client.keys() == [b"grpo:answer:key"]

    asyncio.run(main())


def test_tls_is_a_way_too_and_an_unknown_certificate_is_an_outage(tmp_path, caplog):
    certificate = tmp_path / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    making += ["-keyout", str(tmp_path / "key.pem"), "-out", str(certificate)]
    subprocess.run(making, check=True, capture_output=True)
    port = free_port()
    settings = (f"tls-port {port}", f"tls-cert-file {certificate}", f"tls-key-file {tmp_path}/key.pem")

    async def main() -> None:
        with redis_server(tmp_path, *settings, "tls-auth-clients no"):
            async with opened(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}", timeout_s=1.0) as cache:
                await cache.put("key", b"value")
                assert await cache.get("key") == b"value"
            async with opened(f"rediss://127.0.0.1:{port}", timeout_s=1.0) as cache:
                await bears_an_outage(cache, caplog)
                assert "certificate verify failed" in caplog.text

    asyncio.run(main())


def test_a_name_server_that_hangs_holds_up_nobody_and_few_threads(monkeypatch, caplog):
    lookups = []

    def hang(host: str, *_: object, **__: object) -> None:
        lookups.append(host)
        time.sleep(2.0)  # seconds by default, where no name server answers
        raise socket.gaierror("no name server answered")

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # no cap that would hide them
        async with opened("redis://redis.invalid:6379", breaker_cooldown_s=0.1) as cache:
            await bears_an_outage(cache, caplog)
            num_at_first = len(lookups)
            await asyncio.sleep(1.0)
            assert len(lookups) <= num_at_first + 1  # six probes would be six threads

    asyncio.run(main())
    assert set(lookups) == {"redis.invalid"}


def test_sentinels_say_where_the_server_is_also_after_it_dies(tmp_path):
    watching = [f"sentinel {line}" for line in ("monitor mine 127.0.0.1 {port} 1", "down-after-milliseconds mine 500")]
    watching += [f"sentinel {line}" for line in ("failover-timeout mine 2000", "parallel-syncs mine 1")]

    async def main() -> None:
        with ExitStack() as stack:
            master, pid = stack.enter_context(redis_server(tmp_path, "repl-diskless-sync-delay 0"))
            replica, _ = stack.enter_context(redis_server(tmp_path, f"replicaof 127.0.0.1 {master}"))
            settings = [line.format(port=master) for line in watching]
            sentinel, _ = stack.enter_context(redis_server(tmp_path, *settings))
            frozen, frozen_pid = stack.enter_context(redis_server(tmp_path))
            os.kill(frozen_pid, signal.SIGSTOP)  # a sentinel that hangs, and is asked first
            wait_until(lambda: b"slaves=1" in ask(sentinel, "INFO sentinel"), 10.0, "the sentinel to see the replica")
            wait_until(lambda: b"link_status:up" in ask(replica, "INFO replication"), 10.0, "the replica")
            url = f"redis+sentinel://127.0.0.1:{frozen},127.0.0.1:{sentinel}/mine/0"
            async with opened(url, timeout_s=0.5) as cache:
                await cache.put("key", b"before")
                assert await cache.get("key") == b"before"
                assert ask(master, "EXISTS grpo:answer:key") == b":1\r\n"
                os.kill(pid, signal.SIGKILL)
                await works_again(cache, limit_s=20.0)
                assert ask(replica, "EXISTS grpo:answer:again") == b":1\r\n"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("http://127.0.0.1:6379", "must start with redis://, rediss://, unix://, redis+sentinel://, got http://"),
        ("localhost:6379", "must start with redis://"),
        ("redis://127.0.0.1:port", "must be a Redis URL, got redis://127.0.0.1:port: Port"),
        ("redis://[::1", "cannot be read: Invalid IPv6 URL"),
        ("redis+sentinel://127.0.0.1:1", "must name the service"),
        ("redis+sentinel://127.0.0.1:1,/mine", "each sentinel must be host:port"),
        ("redis+sentinel://127.0.0.1:1/mine/first", "invalid literal for int"),
    ],
)
def test_a_url_of_no_known_kind_is_refused_at_once_without_its_password(url, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        ResponseCache(CacheConfig(), url)
    with pytest.raises(UserError) as raised:
        ResponseCache(CacheConfig(), url.replace("//", "//:secret@", 1) if "//" in url else f"ftp://:secret@{url}")
    assert "secret" not in str(raised.value)
