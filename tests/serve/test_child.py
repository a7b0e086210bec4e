"""A job in a child process: a limit on its time, its last words, its end with its parent's."""

import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from core.errors import DeadlineExceeded, RunBroken
from serve.child import PROJECT, Job, run_job

pytestmark = pytest.mark.fast


def test_a_child_that_is_too_slow_is_ended_with_all_it_started(tmp_path):
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '99']).pid, flush=True)\n"
    code += "print('progress 1 4', flush=True); time.sleep(99)"
    job = Job("counting", ["-c", code], 1.5, "gate.time_limit_s")
    with pytest.raises(
        DeadlineExceeded, match=r"counting must end within 1\.5 s \(gate\.time_limit_s\), got no end, 1 of 4"
    ):
        run_job(job, tmp_path / "log.txt")
    assert_ended(int((tmp_path / "log.txt").read_text().split()[0]))


def test_a_child_that_fails_is_quoted(tmp_path):
    with pytest.raises(RunBroken, match=r"exited with status 1; its last words: .*ZeroDivisionError"):
        run_job(Job("dividing", ["-c", "1 / 0"], 20, "x"), tmp_path / "log.txt")
    with pytest.raises(RunBroken, match="ended by SIGKILL"):
        run_job(Job("dying", ["-c", "import os; os.kill(os.getpid(), 9)"], 20, "x"), tmp_path / "log.txt")


def test_a_child_dies_with_its_parent(tmp_path):
    child = "import os, sys, time; from reward.user_process import die_with_parent; die_with_parent(int(sys.argv[1]))\n"
    child += "print(os.getpid(), flush=True); time.sleep(99)"
    parent = "from pathlib import Path; from serve.child import Job, run_job\n"
    parent += f"run_job(Job('x', ['-c', {child!r}], 99, 'y'), Path({str(tmp_path / 'log.txt')!r}))"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=PROJECT) as process:
        log = tmp_path / "log.txt"
        end = time.monotonic() + 20
        while not (log.exists() and log.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        process.kill()
    assert_ended(int(log.read_text()))


def assert_ended(pid: int) -> None:
    end = time.monotonic() + 5
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, f"process {pid} goes on"
            time.sleep(0.02)
