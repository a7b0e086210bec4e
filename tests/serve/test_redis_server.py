import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError

from core.errors import RunBroken
from serve.cache import redis_server
from serve.cache.redis_server import EmbeddedServer
from serve.cache.responses import ResponseCache
from serve.config import CacheConfig
from tests.reward.processes import gone_within, is_running

pytestmark = pytest.mark.process
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(CacheConfig(max_memory_bytes=8 << 20))
    yield server
    server.close()


def test_it_is_ready_at_once_bounded_and_writes_nothing_to_disk(server):
    with Redis.from_url(server.url) as client:
        assert client.ping()
        settings = {name: client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy", "save", "bind")}
        assert settings == {
            "maxmemory": str(8 << 20),
            "maxmemory-policy": "allkeys-lru",
            "save": "",
            "bind": "127.0.0.1",
        }
        assert client.config_get("appendonly") == {"appendonly": "no"}
    started = time.monotonic()
    EmbeddedServer(CacheConfig()).close()
    assert time.monotonic() - started < 5.0  # a tenth of a second on an idle machine


def test_old_entries_make_room_for_new_ones(server):
    async def main() -> None:
        cache = ResponseCache(CacheConfig(timeout_s=1.0), server.url)
        for i in range(40):
            await cache.put(str(i), os.urandom(1 << 19))  # 20 MiB into 8
        assert await cache.get("39") is not None
        assert await cache.get("0") is None
        assert cache.state.errors == 0
        await cache.aclose()

    asyncio.run(main())


def test_nobody_without_the_password_reads_it_and_the_password_is_not_on_show(server):
    with Redis(port=server.port) as stranger, pytest.raises(AuthenticationError):
        stranger.keys()
    password = server.url.partition("//:")[2].partition("@")[0]
    assert len(password) == 32
    process = psutil.Process(server.pid)
    assert password not in " ".join(process.cmdline()) + str(process.environ())


def test_a_restart_is_empty_and_answers_under_the_same_url_also_after_kill_9(server):
    url, old_pid = server.url, server.pid
    with Redis.from_url(url) as client:
        client.set("key", "value")
    os.kill(old_pid, signal.SIGKILL)
    assert gone_within(old_pid, 5.0)
    deadline = time.monotonic() + 5
    while server.is_running() and time.monotonic() < deadline:  # dead for others a moment before its parent hears of it
        time.sleep(0.01)
    assert not server.is_running()
    server.restart()
    assert server.is_running()
    assert server.url == url
    with Redis.from_url(url) as client:
        assert client.get("key") is None
        client.set("key", "value")
    server.restart()  # of a healthy one
    with Redis.from_url(url) as client:
        assert client.get("key") is None


def test_close_ends_it_even_frozen_and_may_come_twice(server, monkeypatch):
    monkeypatch.setattr(redis_server, "STOP_LIMIT_S", 0.2)
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert not is_running(server.pid)
    server.close()


def test_it_ends_when_it_is_forgotten():
    server = EmbeddedServer(CacheConfig())
    pid = server.pid
    assert is_running(pid)
    del server
    assert gone_within(pid, 5.0)


def test_it_outlives_the_thread_that_started_it():
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer(CacheConfig())))
    thread.start()
    thread.join()
    assert not gone_within(started[0].pid, 0.3)
    with Redis.from_url(started[0].url) as client:
        assert client.ping()
    started[0].close()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_is_gone_with_its_owner_however_that_ends(ending):
    owning = (
        "import signal, time\nfrom serve.config import CacheConfig\n"
        "from serve.cache.redis_server import EmbeddedServer\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "server = EmbeddedServer(CacheConfig())\nprint(server.pid, flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", owning], cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.send_signal(ending)
        assert gone_within(pid, 5.0)
    finally:
        owner.kill()
        owner.communicate()


def test_a_frozen_server_is_gone_with_its_killed_owner_too():
    owning = (
        "import os, signal, time\nfrom serve.cache.redis_server import EmbeddedServer\n"
        "from serve.config import CacheConfig\n"
        "server = EmbeddedServer(CacheConfig())\nos.kill(server.pid, signal.SIGSTOP)\nprint(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", owning], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
    finally:
        owner.kill()
        owner.communicate()
    assert gone_within(pid, 5.0)


def test_a_server_that_does_not_start_says_why(server):
    blocked = EmbeddedServer(CacheConfig())
    blocked.close()
    blocked.port = server.port  # taken by then
    with pytest.raises(RunBroken, match=r"must answer within 10 s on 127\.0\.0\.1:\d+, got exit status 1.*in use"):
        blocked.restart()
