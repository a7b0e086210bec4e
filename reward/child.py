"""One child process and its pipes: spoken to in JSON lines, a limit on every wait, killed with all it started."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_MS = 100  # how often a wait looks whether the child still lives: a grandchild may hold its pipes open
PROJECT = Path(__file__).resolve().parent.parent


class ChildEnded(Exception):
    """The child is gone; says how it ended."""


class ChildSilent(Exception):
    """The child did not answer within the limit."""


class Child:
    """A running `reward.user_process`, leader of its own process group.

    It dies with this process, even after kill -9: the kernel kills its group when the lifeline pipe has no writer left.
    """

    def __init__(self) -> None:
        paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        theirs, ours = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "reward.user_process", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs,),
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        assert process.stdin is not None  # both were asked to be pipes
        assert process.stdout is not None
        self.pid = process.pid
        self._process, self._requests, self._replies = process, process.stdin.fileno(), process.stdout.fileno()
        self._unread = bytearray()
        self._end = weakref.finalize(self, _end, process, ours)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)

    def send(self, message: dict[str, Any], limit_s: float) -> None:
        """Waits until the child has taken the message; ChildSilent after limit_s, ChildEnded where it is gone."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        deadline = time.monotonic() + limit_s
        while data:
            self._wait(self._requests, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ChildEnded(self._ending()) from None

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The child's next message; waited for at most limit_s, then ChildSilent; ChildEnded where it is gone."""
        deadline = time.monotonic() + limit_s
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            self._wait(self._replies, select.POLLIN, deadline)
            try:
                data = os.read(self._replies, 1 << 16)
            except BlockingIOError:
                continue
            if not data:
                raise ChildEnded(self._ending())
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return json.loads(line)

    def close(self, grace_s: float = 0.0) -> None:
        """Ends the child and everything in its process group; first gives it grace_s to end by itself."""
        if grace_s and self._end.alive:
            self._process.stdin.close()  # type: ignore[union-attr]
            deadline = time.monotonic() + grace_s
            while not _has_ended(self.pid) and time.monotonic() < deadline:
                time.sleep(0.005)
        self._end()

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(POLL_MS):
            if _has_ended(self.pid):
                raise ChildEnded(self._ending())
            if time.monotonic() > deadline:
                raise ChildSilent

    def _ending(self) -> str:
        """How the child ended, in words; ends it where it only closed its pipes."""
        deadline = time.monotonic() + 1.0
        while not _has_ended(self.pid) and time.monotonic() < deadline:
            time.sleep(0.005)
        closed_only = not _has_ended(self.pid)
        self._end()
        status = self._process.returncode
        if closed_only:
            return "its process closed its pipes"
        if status < 0:
            return f"its process was ended by {signal.Signals(-status).name}"
        return f"its process exited with status {status}"


def _has_ended(pid: int) -> bool:
    """Whether the child has ended; leaves it a zombie, so that its group's number is not reused before it is killed."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # somebody else has waited for it


def _end(process: subprocess.Popen[bytes], lifeline: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    os.close(lifeline)
