"""Everything behind the public port on this machine, up together and gone together."""

import contextlib
import json
import logging
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil
import ray
from ray import serve

from cluster.session import NAMESPACE, end_session, start_session
from core.durable import write_text
from core.machine import read_machine
from serve.application import open_port, start_board, start_gateway, start_registered
from serve.cache.keeper import NAME as CACHE
from serve.cache.keeper import cache_url_of
from serve.config import ServeConfig
from serve.names import GATEWAY
from serve.rollout.traffic import BOARD
from serve.running import RECORD

Say = Callable[[str], None]


class Server:
    """Ray, the cache, the registered versions and the gateway; a context manager."""

    def __init__(self, config: ServeConfig, say: Say) -> None:
        self._config, self._say = config, say
        self._recorded = False
        self.url = f"http://{config.gateway.host}:{config.gateway.port}"

    def __enter__(self) -> Self:
        """Returns when the gateway answers. RunBroken where no version is registered."""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what a person needs of it, is said below
        try:
            session = start_session(self._config.cluster, read_machine())
            self._say(f"Ray dashboard: {session.dashboard or 'none'}")
            open_port(self._config)
            start_board()
            cache_url = cache_url_of(self._config.cache)
            start_registered(self._config, self._say)
            self._say("starting the gateway")
            start_gateway(self._config, cache_url)
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ray.init puts its own in the place of ours
            own = psutil.Process()
            address = ray.get_runtime_context().gcs_address
            record = {"url": self.url, "pid": own.pid, "began": own.create_time(), "ray_address": address}
            write_text(self._config.serve_dir / RECORD, json.dumps(record) + "\n")
            self._recorded = True
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets running answers end, at most replica.drain_s, then ends everything."""
        for number in (signal.SIGINT, signal.SIGTERM):  # one is enough
            signal.signal(number, signal.SIG_IGN)
        if self._recorded:
            (self._config.serve_dir / RECORD).unlink(missing_ok=True)
        try:
            if ray.is_initialized():
                # First the gateway alone: the proxy must still be there to carry its last answers.
                with contextlib.suppress(Exception):
                    serve.delete(GATEWAY)
                serve.shutdown()
                for name in (CACHE, BOARD):
                    with contextlib.suppress(ValueError):
                        ray.kill(ray.get_actor(name, NAMESPACE))
        finally:
            end_session()
