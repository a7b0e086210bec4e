"""The actor that owns the embedded cache server: gateways come and go, the server stays, and is started again."""

import contextlib
import secrets
import threading
from typing import Any

import ray

from cluster.session import NAMESPACE
from core.errors import RunBroken
from serve.cache.redis_server import EmbeddedServer, free_port
from serve.config import CacheConfig

NAME = "response-cache"
WATCH_S = 0.5
START_LIMIT_S = 60.0


class CacheServer:
    """Holds an EmbeddedServer and restarts it, under the same url, when it is gone."""

    def __init__(self, config: CacheConfig, password: str, port: int) -> None:
        """password and port are given so that an actor that Ray starts again has the same url."""
        self._server = EmbeddedServer(config, password, port)
        self._num_restarts = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def url(self) -> str:
        return self._server.url

    def pid(self) -> int:
        """The server's process, for those who want to see it die."""
        return self._server.pid

    def num_restarts(self) -> int:
        return self._num_restarts

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(WATCH_S):
            if self._server.is_running():
                continue
            with contextlib.suppress(RunBroken, OSError):  # tried again at the next look; meanwhile there is no cache
                self._server.restart()
                self._num_restarts += 1


def start_cache_server(config: CacheConfig) -> Any:
    """The actor's handle; the one already there where serving was started before."""
    return (
        ray.remote(CacheServer)
        .options(name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=-1)
        .remote(config, secrets.token_urlsafe(24), free_port())
    )


def cache_url_of(config: CacheConfig) -> str | None:
    """Where the cache is: the configured Redis, else an embedded server, which is started; None where it is off."""
    if not config.enabled:
        return None
    if config.redis_url is not None:
        return config.redis_url
    return str(ray.get(start_cache_server(config).url.remote(), timeout=START_LIMIT_S))
