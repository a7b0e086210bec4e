"""The Ray session of a run: one of our own on this machine, or the cluster the job was submitted to."""

import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import ray

from core.config import ClusterConfig
from core.errors import UserError
from core.machine import Machine, object_store_bytes

NAMESPACE = "grpo"  # of named actors: who joins later finds them
PROJECT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Session:
    """What a person may want to know of the running Ray."""

    dashboard: str  # address, "" where there is none
    num_cpus: float
    num_gpus: float
    owned: bool  # started by us, and ended with us


def start_session(config: ClusterConfig, machine: Machine) -> Session:
    """A connected Session; UserError in one sentence where Ray cannot be had.

    Never joins a cluster it was not told of: RAY_ADDRESS counts only inside a job that `ray job submit` started.
    """
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    address = config.address or ("auto" if in_job else "local")
    # Ray's own usage statistics and its coming change of a GPU variable concern nobody here.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")
    # Training is what this machine is for now: Ray would start its workers at nice 15.
    os.environ.setdefault("RAY_worker_niceness", "0")
    own = {
        "num_cpus": machine.num_cores,
        "object_store_memory": config.object_store_bytes or object_store_bytes(machine),
        "include_dashboard": True,
        "dashboard_host": config.dashboard_host,
        "_node_ip_address": "127.0.0.1",  # nobody else has business with a Ray of our own: all its ports on loopback
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            context = ray.init(
                address=address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                namespace=NAMESPACE,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(_python_path())}},
                **(own if address == "local" else {}),
            )
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            words = " ".join(str(error).split())
            raise UserError(
                f"Ray must start or be reachable at cluster.address={address}, got {type(error).__name__}: {words}; "
                "check `ray status`, the port, and free space in /tmp and /dev/shm"
            ) from None
    resources = ray.cluster_resources()
    url = context.dashboard_url
    return Session(f"http://{url}" if url else "", resources.get("CPU", 0), resources.get("GPU", 0), address == "local")


def end_session() -> None:
    """Disconnects, and ends the Ray that start_session started."""
    ray.shutdown()


def _python_path() -> list[str]:
    """Workers import the project's folders, whatever folder the driver was started from."""
    given = os.environ.get("PYTHONPATH")
    return [str(PROJECT), *([given] if given else [])]
