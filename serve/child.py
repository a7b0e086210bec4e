"""One job in a process of its own: what it takes of memory is returned, its time has a limit, it dies with its parent.

The child appends to a log; a line `progress DONE TOTAL` in it is said to whoever waits. It gets the lifeline's file
descriptor as its last argument and calls `reward.user_process.die_with_parent` with it.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import DeadlineExceeded, RunBroken

PROJECT = Path(__file__).resolve().parent.parent
SAY_EVERY_S = 5.0
_POLL_S = 0.2
_TAIL_BYTES = 1 << 14
_PROGRESS = re.compile(rb"^progress (\d+) (\d+)$", re.MULTILINE)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What a child is started for."""

    what: str  # "quantising 1234abcd", in messages
    arguments: list[str]  # of the interpreter
    time_limit_s: float
    limit_name: str  # the config key to raise
    first_on_path: tuple[str, ...] = ()  # folders of packages that hide this environment's
    environment: dict[str, str] = field(default_factory=dict)


def say_plainly(sentence: str) -> None:
    print(sentence, flush=True)


def run_job(job: Job, log: Path, say: Say = say_plainly) -> None:
    """Returns once the job ended well. Says its progress every few seconds.

    Waits for: the child's end; unblocked by that or by the time limit. Raises DeadlineExceeded after the limit, and
    RunBroken with the child's last words where it ended otherwise; the child and all it started are gone in each case.
    """
    theirs, ours = os.pipe()
    paths = [*job.first_on_path, str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    started = time.monotonic()
    with log.open("ab") as stream:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", *job.arguments, str(theirs)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
                env=os.environ | job.environment | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
    try:
        _wait(process, job, log, say, started)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the child's own children, or all of them after the limit
        process.wait()
        os.close(ours)
    if process.returncode:
        raise RunBroken(f"{job.what} must end well, but {_ending(process.returncode)}; its last words: {_words(log)}")


def _wait(process: subprocess.Popen[bytes], job: Job, log: Path, say: Say, started: float) -> None:
    said = started
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return
        now = time.monotonic()
        if now - started > job.time_limit_s:
            raise DeadlineExceeded(
                f"{job.what} must end within {job.time_limit_s:g} s ({job.limit_name}), got no end{_progress(log)}; "
                f"raise the limit; its last words: {_words(log)}"
            )
        if now - said > SAY_EVERY_S:
            said = now
            say(f"{job.what}: {now - started:.0f} s{_progress(log)}")


def _progress(log: Path) -> str:
    found = _PROGRESS.findall(_tail(log))
    return f", {int(found[-1][0])} of {int(found[-1][1])} parts done" if found else ""


def _ending(status: int) -> str:
    if status < 0:
        reason = " (the machine may be out of memory)" if status == -signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-status).name}{reason}"
    return f"its process exited with status {status}"


def _words(log: Path) -> str:
    lines = [line.strip() for line in _tail(log).decode("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(line for line in lines if not line.startswith("progress "))[-1500:] or "none"


def _tail(log: Path) -> bytes:
    with log.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - _TAIL_BYTES))
        return stream.read()
