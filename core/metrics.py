"""metrics.jsonl, one JSON object a step, and summary.json: what the report, the benchmark and the tests read."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from core.durable import free_bytes, write_text
from core.errors import RunBroken

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


class MetricsLog:
    """The open metrics.jsonl of a run; one process writes. A last line torn by a kill is cut on opening."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / METRICS
        run_dir.mkdir(parents=True, exist_ok=True)
        self._stream = self._path.open("ab+", buffering=0)
        _cut_torn_line(self._stream)

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Adds one durable line. `step` is required; nan and inf become null and their keys are listed in `non_finite`.

        Raises ValueError for a missing step or a value JSON has no word for, RunBroken where the disk refuses.
        """
        step = metrics.get("step")
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
            raise ValueError(f"metrics must hold an integer step >= 0, got {step!r} ({self._path})")
        line = (_json(metrics) + "\n").encode()
        end = self._stream.seek(0, os.SEEK_END)
        try:
            while line:  # a nearly full disk takes a part, then refuses
                line = line[self._stream.write(line) :]
            os.fsync(self._stream.fileno())
        except OSError as error:
            os.ftruncate(self._stream.fileno(), end)
            raise RunBroken(
                f"{self._path} could not be written: {error.strerror}; {free_bytes(self._path)} bytes are free there"
            ) from error

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step, in the order of steps; the last line of a step wins (earlier ones were rolled back).

    A torn last line is left out; an empty list where there is no file. Raises RunBroken for a broken line elsewhere.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")  # a whole line ends in a newline, so what follows the last is torn
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            by_step[int(row["step"])] = row
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise RunBroken(f"{path} line {number} must be a JSON object with a step, got {line[:80]!r}") from error
    return [by_step[step] for step in sorted(by_step)]


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """The path of summary.json, replaced whole: a reader sees the old one or the new one, never half."""
    path = run_dir / SUMMARY
    write_text(path, _json(summary, indent=1) + "\n")
    return path


def _json(values: Mapping[str, Any], indent: int | None = None) -> str:
    non_finite: list[str] = []
    plain = {str(key): _plain(value, str(key), non_finite) for key, value in values.items()}
    if non_finite:
        plain["non_finite"] = sorted(non_finite)
    return json.dumps(plain, indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any, key: str, non_finite: list[str]) -> Any:
    """The value in JSON's own types; dotted keys of nan and inf are added to `non_finite`."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()  # numpy's own numbers become Python's
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        non_finite.append(key)
        return None
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{key}.{name}", non_finite) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}.{place}", non_finite) for place, inner in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"metric {key} must be a number, text, list or mapping, got {type(value).__name__}")


def _cut_torn_line(stream: Any) -> None:
    """Without this the next line would be glued to the torn one, and both lost."""
    end = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    whole = stream.read().rfind(b"\n") + 1
    if whole < end:
        os.ftruncate(stream.fileno(), whole)
    stream.seek(0, os.SEEK_END)
