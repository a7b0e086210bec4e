"""Whole runs as a user starts them: train.py in a process group of its own, on the tiny model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


class RunningTraining:
    """train.py under way; ended, with all its children, by close()."""

    def __init__(self, config: Path, run_dir: Path, *overrides: str) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(".log")
        self._stream = self.log.open("ab")
        command = [sys.executable, "train.py", str(config), f"run_dir={run_dir}", *overrides]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=self._stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def steps(self) -> int:
        """Steps that metrics.jsonl holds."""
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def wait_for(self, what: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `what` holds; fails with the log where the run ends or the time is over first."""
        end = time.monotonic() + timeout_s
        while not what():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(
                    f"the run did not get there (status {self.process.poll()}):\n{self.text()[-4000:]}"
                )
            time.sleep(0.2)

    def worker(self, title: str) -> psutil.Process:
        """The run's own Ray worker whose process title holds `title`."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if title in " ".join(child.cmdline()):
                return child
        raise AssertionError(f"no worker {title} in {self.text()[-2000:]}")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_driver(self) -> None:
        """kill -9 of the driver alone."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        for process in [*(self.descendants() if self.process.poll() is None else []), psutil.Process()]:
            if process.pid != os.getpid():
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._stream.close()


def still_running(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that have not ended when the time is over; returns as soon as all have. Zombies have ended."""
    end = time.monotonic() + within_s
    while processes and time.monotonic() < end:
        time.sleep(0.2)
        processes = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    return processes


def audit(run_dir: Path) -> subprocess.CompletedProcess[str]:
    """python -m core.ledger audit RUN_DIR, as a user calls it."""
    command = [sys.executable, "-m", "core.ledger", "audit", str(run_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
