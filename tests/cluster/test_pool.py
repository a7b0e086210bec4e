"""Pools on a real Ray: the dead are replaced, the silent are named, the hopeless end the run with the first cause."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import ray

from cluster.pool import WORKER_GONE, Pool
from core.config import ClusterConfig
from core.errors import DeadlineExceeded, RunBroken

pytestmark = pytest.mark.ray

LIMITS = ClusterConfig(restart_limit=2, restart_backoff_s=0.01)


class Echo:
    """A worker that answers, dies or falls silent as it is told; each start leaves a line in a file."""

    def __init__(self, name: str, starts: str, dies_at_start: bool = False) -> None:
        with Path(starts).open("a") as stream:
            stream.write(f"{name}\n")
        if dies_at_start:
            os._exit(1)
        self.name = name

    def ready(self) -> str:
        return self.name

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return self.name


@pytest.fixture
def make_pool(ray_session, tmp_path):
    pools = []

    def make(num_workers: int, **options) -> Pool:
        actor = ray.remote(num_cpus=0)(Echo)

        def spawn(name):
            handle = actor.remote(name, str(tmp_path / "starts"), **options)
            return handle, handle.ready.remote()

        pools.append(Pool("echo", num_workers, spawn, LIMITS))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def say(text: str) -> None:
    pass


def test_jobs_go_to_the_least_loaded_worker(make_pool):
    pool = make_pool(2)
    pool.wait_ready(60, say)
    calls = [pool.call("pid") for _ in range(4)]
    assert sorted(call.worker.name for call in calls) == ["echo-0", "echo-0", "echo-1", "echo-1"]
    assert len({pool.get(call, 30, say, "") for call in calls}) == 2


def test_a_worker_killed_by_the_system_is_replaced_once_however_many_calls_it_took_along(make_pool):
    pool = make_pool(1)
    pool.wait_ready(60, say)
    pid = pool.get(pool.call("pid"), 30, say, "")
    calls = [pool.call("sleep", 30) for _ in range(3)]
    os.kill(pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(WORKER_GONE) as caught:
            pool.get(call, 30, say, "")
        pool.replace(call.worker, call.handle, caught.value)
    assert pool.num_replaced == 1
    assert pool.get(pool.call("pid"), 30, say, "") != pid


def test_a_silent_worker_is_named_with_the_time_waited(make_pool):
    pool = make_pool(1)
    pool.wait_ready(60, say)
    heard = []
    with pytest.raises(DeadlineExceeded, match=r"echo-0 must answer within 1 s \(to sleep\), got nothing for"):
        pool.get(pool.call("sleep", 30), 1, heard.append, "to sleep")
    assert any("waiting for echo-0 to sleep" in text for text in heard)


def test_a_worker_that_dies_at_every_start_ends_the_run_after_bounded_tries(make_pool, tmp_path):
    pool = make_pool(1, dies_at_start=True)
    with pytest.raises(RunBroken, match="echo-0 must stay alive, but died 3 times in a row; first cause: "):
        pool.wait_ready(60, say)
    assert len((tmp_path / "starts").read_text().splitlines()) == 3  # the first start and restart_limit replacements


def test_of_several_workers_asked_at_once_the_dead_one_is_named_at_once(make_pool):
    pool = make_pool(2)
    pool.wait_ready(60, say)
    pid = pool.get(pool.call("pid", worker=pool.workers[1]), 30, say, "")
    calls = [pool.call("sleep", 60, worker=worker) for worker in pool.workers]
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RunBroken, match="echo-1 died"):
        pool.gather(calls, 60, say, "to sleep")
    assert time.monotonic() - began < 30


def test_processes_beside_ray_keep_their_exit_status(ray_session):
    # Ray can be told to reap every child of its processes itself; a reward's child would then seem to end well.
    assert subprocess.run(["sh", "-c", "exit 7"]).returncode == 7
