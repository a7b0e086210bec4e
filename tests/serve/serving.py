"""A whole serving on the tiny model: real Ray Serve, real vLLM replicas, a real cache server, a real HTTP port."""

from pathlib import Path
from typing import Any

import ray
from openai import OpenAI
from ray import serve

from core.config import parse_config
from serve.application import open_port, start_board, start_gateway, start_version
from serve.artefacts.export import export_run
from serve.cache.keeper import start_cache_server
from serve.cache.redis_server import free_port
from serve.config import ServeConfig
from serve.registry import Registry
from tests.tiny import save_tiny_model


class Serving:
    """Two versions of the tiny model exported, the first one serving."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        tree: dict[str, Any] = {
            "serve_dir": str(folder / "serving"),
            "gateway": {"port": self.port, "max_body_bytes": 200_000, "routing_lease_s": 0.5},
            "replica": {
                "dtype": "float32",
                "max_model_len": 256,
                "max_num_sequences": 32,
                "kv_cache_bytes": 1 << 26,
                "threads": 1,
                "cpus": 0,
                "drain_s": 10,
            },
            "cache": {"breaker_cooldown_s": 0.5},
        }
        self.config = parse_config(tree, "the suite's serving", ServeConfig)
        self.digests = [
            export_run(save_tiny_model(folder / f"model{seed}", seed=seed), self.config.serve_dir).digest
            for seed in (1, 2)
        ]
        self.registry = Registry(self.config.serve_dir)
        self.registry.compare_and_set(0, "the first", stable=self.digests[0])
        self.cache_server = start_cache_server(self.config.cache)
        open_port(self.config)
        self.board = start_board()
        start_version(self.config, self.digests[0])
        start_gateway(self.config, ray.get(self.cache_server.url.remote(), timeout=60))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=120, **settings)

    def close(self) -> None:
        serve.shutdown()
        ray.kill(self.cache_server)
        ray.kill(self.board)
