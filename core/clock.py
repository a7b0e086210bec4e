"""Seconds of each phase of a step."""

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds of each phase of the step under way."""

    started: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, phase: str) -> "Phase":
        return Phase(self, phase)


@dataclass
class Phase:
    clock: Clock
    name: str
    began: float = 0.0

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self.began
        self.clock.seconds[self.name] = self.clock.seconds.get(self.name, 0.0) + spent
