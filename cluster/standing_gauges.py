"""Gauges of Ray that stand until they are set again.

Ray passes a gauge's value on once and forgets it within 20 s. What is told once a step would leave gaps in every curve,
so a thread sets the last values again.
"""

import threading

import ray
from ray.util.metrics import Gauge

REFRESH_S = 5.0  # Ray's processes report every 10 s, and its agents keep a value for two reports


class StandingGauges:
    """Gauges whose names start with `prefix` and which all have the same labels; any thread may set them."""

    def __init__(self, prefix: str, label_names: tuple[str, ...], refresh_s: float = REFRESH_S) -> None:
        self._prefix, self._label_names, self._refresh_s = prefix, label_names, refresh_s
        self._gauges: dict[str, Gauge] = {}
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gauges", daemon=True)
        self._thread.start()

    def set(self, name: str, labels: tuple[str, ...], value: float, words: str = "") -> None:
        """The value of the gauge `name` from now on; `words` describe it."""
        with self._lock:
            if name not in self._gauges:
                self._gauges[name] = Gauge(self._prefix + name, words, self._label_names)
            self._values[name, labels] = value
            self._tell(name, labels)

    def close(self) -> None:
        """The values fade from now on."""
        self._ended.set()
        self._thread.join()

    def _tell(self, name: str, labels: tuple[str, ...]) -> None:
        if ray.is_initialized():
            tags = dict(zip(self._label_names, labels, strict=True))
            self._gauges[name].set(self._values[name, labels], tags)

    def _run(self) -> None:
        while not self._ended.wait(self._refresh_s):
            with self._lock:
                for name, labels in self._values:
                    self._tell(name, labels)
