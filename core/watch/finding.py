"""One trouble of a training run: how bad it is, the numbers seen, and the config line that cures it."""

from dataclasses import dataclass
from typing import Any, Literal

from core.config import Config

# critical: ends or wastes the run; warning: costs accuracy; note: costs time, or is what the end of a run looks like
Severity = Literal["critical", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note")
# The ledger keeps these for the whole life of a run folder.
_OF_A_NEW_RUN = ("prompts_per_step", "max_staleness", "seed", "rollout.samples_per_prompt", "data.", "policy.")


@dataclass(frozen=True)
class Cure:
    """A config key, the value it should have, and the one it has."""

    key: str
    value: Any
    now: Any

    @property
    def word(self) -> str:
        """What to add to the command line."""
        return f"{self.key}={_text(self.value)}"

    def text(self) -> str:
        where = ", needs a new run_dir" if self.key.startswith(_OF_A_NEW_RUN) else ""
        return f"{self.word} (now {_text(self.now)}{where})"


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str  # the check's name
    severity: Severity
    seen: str  # what is wrong, with the numbers, in words
    cures: tuple[Cure, ...]  # the first is the one to try first
    advice: str = ""  # what no config line says

    def text(self) -> str:
        """One line: the trouble and its cure."""
        parts = ["set " + " or ".join(cure.text() for cure in self.cures)] if self.cures else []
        parts += [self.advice] if self.advice else []
        return f"{self.severity}: {self.check}: {self.seen}; {'; '.join(parts)}"


def cures_of(config: Config, **values: Any) -> tuple[Cure, ...]:
    """The Cure of each key, its dots written as two underscores; those that hold the value already are left out."""
    found = []
    for name, value in values.items():
        key = name.replace("__", ".")
        now: Any = config
        for part in key.split("."):
            now = getattr(now, part)
        if now != value:
            found.append(Cure(key, value, now))
    return tuple(found)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
