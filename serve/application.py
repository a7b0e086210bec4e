"""The Ray Serve applications: one gateway, and one deployment of replicas a version."""

from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from actors.crew import environment
from cluster.session import NAMESPACE
from core.config import load_config
from core.errors import RunBroken
from core.machine import read_machine
from serve.cache.keeper import cache_url_of
from serve.config import ServeConfig
from serve.names import GATEWAY, application_of
from serve.registry import Registry
from serve.replica import Replica
from serve.rollout.traffic import BOARD, TrafficBoard

# A line a request in three processes cost a tenth of a cached answer; /metrics counts requests.
QUIETLY = {"log_level": "WARNING", "enable_access_log": False}


def open_port(config: ServeConfig) -> None:
    """Starts Ray Serve on the public address: before any application, or it takes one of its own."""
    gateway = config.gateway
    serve.start(
        http_options={
            "host": gateway.host,
            "port": gateway.port,
            "request_timeout_s": gateway.request_timeout_s,  # Ray's router waits for a replica for ever
        },
        logging_config=QUIETLY,
    )


def start_board() -> Any:
    """The actor that gateways report their traffic to; the one already there where serving was started before."""
    return (
        ray.remote(TrafficBoard)
        .options(name=BOARD, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=-1)
        .remote()
    )


def start_gateway(config: ServeConfig, cache_url: str | None) -> None:
    """Starts the gateway; returns when it answers. open_port comes first, and a version must be registered."""
    serve.run(_gateway_of(config, cache_url), name=GATEWAY, route_prefix="/")


def gateway(arguments: dict[str, Any]) -> Application:
    """The gateway for `serve deploy`: arguments hold `config`, a file, and any key=value of it; paths are absolute."""
    words = [f"{key}={value}" for key, value in arguments.items() if key != "config"]
    config = load_config(arguments["config"], words, ServeConfig)
    start_board()
    return _gateway_of(config, cache_url_of(config.cache))


def _gateway_of(config: ServeConfig, cache_url: str | None) -> Application:
    def build() -> Any:
        """Runs in the gateway's process, and imports vLLM only there: it takes twenty seconds."""
        from serve.gateway.surface import build_gateway

        start_registered(config)
        return build_gateway(config, cache_url)

    deployment = serve.deployment(
        name="Gateway",
        num_replicas=config.gateway.num_replicas,
        max_ongoing_requests=1024,  # the replicas' queues are what limits
        ray_actor_options={"num_cpus": 0, "runtime_env": environment(1)},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=config.replica.drain_s,
        logging_config=QUIETLY,
    )(serve.ingress(build)())
    return deployment.bind()


def start_registered(config: ServeConfig, say: Callable[[str], None] = print) -> None:
    """Starts the versions of the registry's routing that do not run yet. RunBroken where none is registered.

    A canary that does not come up is taken out of the routing: the stable version serves alone.
    """
    registry = Registry(config.serve_dir)
    routing = registry.routing()
    if routing.stable is None:
        raise RunBroken(f"a version must be registered in {config.serve_dir} before serving starts, got none")
    for digest in filter(None, (routing.stable, routing.canary)):
        if is_running(digest):
            continue
        say(f"starting version {digest[:12]}")
        try:
            start_version(config, digest)
        except RuntimeError as error:
            if digest == routing.stable:
                raise
            reason = f"the canary did not start: {' '.join(str(error).split())[:500]}"
            say(f"version {digest[:12]} is taken out of the routing: {reason}")
            registry.compare_and_set(routing.epoch, reason, canary=None)
            stop_version(digest)


def start_version(config: ServeConfig, digest: str) -> None:
    """Starts the replicas of a version; returns when they are ready. RuntimeError where they do not come up."""
    replica = config.replica
    deployment = serve.deployment(
        name="Replica",
        max_ongoing_requests=replica.max_ongoing_requests,
        max_queued_requests=replica.max_queued_requests,
        autoscaling_config={
            "min_replicas": replica.min_replicas,
            "max_replicas": replica.max_replicas,
            "target_ongoing_requests": replica.target_ongoing_requests,
        },
        ray_actor_options={
            "num_cpus": replica.cpus,
            "num_gpus": replica.tensor_parallel_size if replica.device == "cuda" else 0,
            "runtime_env": environment(replica.threads or read_machine().num_cores),
        },
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=replica.drain_s,
        logging_config=QUIETLY,
    )(Replica)
    serve.run(deployment.bind(config, digest), name=application_of(digest), route_prefix=None)


def is_running(digest: str) -> bool:
    """Whether the version's replicas are up."""
    application = serve.status().applications.get(application_of(digest))
    return application is not None and application.status == "RUNNING"


def stop_version(digest: str) -> None:
    """Drains and ends a version's replicas."""
    serve.delete(application_of(digest))
