"""The 4-bit version of what serves: made and judged behind it, and put in its place where the gate lets it."""

import threading
from collections.abc import Callable

from serve.application import start_version
from serve.artefacts.artefact import artefacts_folder, load_artefact
from serve.config import ServeConfig
from serve.preparation import quantised
from serve.registry import LostRace, Registry


class Quantisation:
    """A thread beside a running server; whatever goes wrong in it is said, and the server goes on."""

    def __init__(self, config: ServeConfig, registry: Registry, say: Callable[[str], None]) -> None:
        self._config, self._registry, self._say = config, registry, say
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="quantisation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Nothing is said or put in place from now on; the child under way dies with this process."""
        self._is_ending = True

    def _run(self) -> None:
        try:
            self._replace()
        except LostRace:
            self._tell("another version took over before the quantised one was ready; it is kept, not served")
        except Exception as error:
            self._tell(f"not quantised: {type(error).__name__}: {error}")

    def _replace(self) -> None:
        routing = self._registry.routing()
        full = load_artefact(artefacts_folder(self._config.serve_dir) / (routing.stable or ""))
        if full.origin.quantization != "none" or routing.canary:  # a rollout under way goes on
            return
        chosen = quantised(full, self._config, self._tell)
        if chosen is None or self._is_ending:
            return
        self._tell(f"starting version {chosen.digest[:12]}")
        start_version(self._config, chosen.digest)
        self._registry.compare_and_set(routing.epoch, "quantised, and passed the gate", stable=chosen.digest)
        self._tell(f"serving version {chosen.digest[:12]} from now on; {full.digest[:12]} stays warm")

    def _tell(self, sentence: str) -> None:
        if not self._is_ending:
            self._say(sentence)
