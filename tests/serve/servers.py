"""Real servers for the tests: Debian's redis-server and its sentinel, and servers that lie about being one."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

START_LIMIT_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, *commands: str) -> bytes:
    """The raw replies of a server, as far as they come at once; b"" where it does not answer."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall("".join(f"{command}\r\n" for command in commands).encode())
        return connection.recv(1 << 16)
    return b""


def wait_until(holds: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        time.sleep(0.02)


@contextmanager
def redis_server(folder: Path, *settings: str, port: int = 0, ready: str = "PING") -> Iterator[tuple[int, int]]:
    """(port, pid) of a Debian redis-server with these lines in its configuration."""
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.fail("redis-server must be on the PATH for this test, got none; apt-get install redis-server")
    port = port or free_port()
    configuration = folder / f"{port}.conf"  # a sentinel writes to it
    log = folder / f"{port}.log"
    lines = ("bind 127.0.0.1", f"port {port}", f"dir {folder}", f"logfile {log}", *settings)
    configuration.write_text("\n".join(lines) + "\n")
    sentinel = ["--sentinel"] if any(line.startswith("sentinel ") for line in settings) else ['--save ""']
    process = subprocess.Popen([binary, str(configuration), *sentinel], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: ask(port, ready) != b"", START_LIMIT_S, f"redis-server on port {port}, see {log}")
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def lying_server(behave: Callable[[socket.socket], None], port: int = 0) -> Iterator[int]:
    """Port of a server that lets `behave` do as it likes with each connection, in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            behave(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        for end in (listener, *connections):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
            end.close()


def stay_silent(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def hang_up(connection: socket.socket) -> None:
    connection.recv(1 << 16)


def speak_http(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def lie_about_sizes(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b"$12x\r\n\xff\xfe\r\n*-7\r\n$99999999999999\r\nab")


def answer_with_numbers(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        connection.sendall(b":7\r\n")


def trickle(connection: socket.socket) -> None:
    """A reply that never stops and never ends: every read of it makes progress."""
    connection.recv(1 << 16)
    connection.sendall(b"$1000000\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.005)
