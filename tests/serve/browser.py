"""A headless Chromium (Debian package `chromium`), driven over the DevTools protocol."""

import contextlib
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

START_S = 60.0


class Browser:
    """One page in a browser of its own: a context manager. Keeps what the page asked for and what went wrong in it."""

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium")
        if program is None:
            raise RuntimeError("the page's tests need a browser, got none; apt-get install chromium")
        self.requests: list[dict[str, Any]] = []
        self.complaints: list[str] = []  # errors of the console, among them those of the content policy
        self._numbers = itertools.count(1)
        self._session = ""
        self._open = contextlib.ExitStack()
        self._socket: ClientConnection | None = None
        self._log = (profile / "chromium.log").open("wb")
        self._port_file = profile / "DevToolsActivePort"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        self._process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={profile}", "about:blank"], stdout=self._log, stderr=self._log
        )

    def __enter__(self) -> Self:
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _attach(self) -> None:
        """Waits for: the browser's port. RuntimeError where it does not come."""
        until = time.monotonic() + START_S
        while not (self._port_file.is_file() and len(self._port_file.read_text().split()) == 2):
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"chromium must start within {START_S:g} s; see {self._log.name}")
            time.sleep(0.05)
        port, path = self._port_file.read_text().split()
        address = f"ws://127.0.0.1:{port}{path}"
        self._socket = self._open.enter_context(connect(address, max_size=None, proxy=None))
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.send(f"{domain}.enable")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one DevTools command."""
        assert self._socket is not None
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._socket.send(json.dumps({"id": number, "method": method, "params": params} | session))
        while True:
            message = json.loads(self._socket.recv(30))
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, script: str, limit_s: float = 15.0) -> Any:
        """The expression's value once it is true; TimeoutError names what never became so."""
        until = time.monotonic() + limit_s
        while not (value := self.run(script)):
            if time.monotonic() > until:
                raise TimeoutError(f"{script} did not become true in {limit_s:g} s; complaints: {self.complaints}")
            time.sleep(0.05)
        return value

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
