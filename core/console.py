"""What a person sees while a run goes on: a live table on a terminal, plain lines (one a step) elsewhere."""

import contextlib
import math
import re
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

import rich.console
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from core.terminal import CapturedTerminal, is_live, plain_text

_NUM_RECENT = 10  # newest steps in the table, and in the median that is the pace for the time left
_LINES_AROUND = 8  # of the table: progress, accuracy, phase, header and a line of air
_GAP = 2  # characters between two columns
_REDRAW_S = 0.25  # between two redraws while nothing happens: the seconds of the phase go on


class Column(NamedTuple):
    key: str  # of the step's metrics
    title: str  # two lines in the table
    word: str  # in a plain line; {} is the value
    form: str  # format specification of the value
    width: int  # characters in the table
    rank: int  # the highest goes first where the terminal is narrow


_COLUMNS = (
    Column("reward_mean", "reward\nmean", "reward {}", ".3f", 6, 0),
    Column("heldout_accuracy", "held-out\naccuracy", "held-out accuracy {}", ".3f", 8, 1),
    Column("entropy", "entropy\nnats", "entropy {}", ".3f", 7, 3),
    Column("rollout_tokens_per_s", "rollout\ntokens/s", "rollout {} tokens/s", ",.0f", 8, 4),
    Column("learner_tokens_per_s", "learner\ntokens/s", "learner {} tokens/s", ",.0f", 8, 5),
    Column("staleness_mean", "stale\nmean", "staleness {}", ".2f", 5, 7),
    Column("mean_abs_logprob_difference", "sampler\nmismatch", "mismatch {}", ".4f", 8, 6),
    Column("seconds", "s a\nstep", "{} s/step", ".1f", 6, 2),
)


class Console:
    """Progress of a run on a stream: a context manager; every method may be called from any thread.

    Step k of n counts from 1: the metrics of the loop's step 0 are shown as step 1. A metric that is missing, None or
    not a number is left out. Lines that other libraries print meanwhile appear above the table.
    """

    def __init__(self, num_steps: int, start_step: int = 0, stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._num_done = start_step
        self._stream = sys.stdout if stream is None else stream
        self._rows: deque[dict[str, Any]] = deque(maxlen=_NUM_RECENT)
        self._seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        self._accuracies: list[tuple[int, float]] = []  # (step, held-out accuracy), first and newest
        self._phase, self._phase_since = "", time.monotonic()
        self._terminal: CapturedTerminal | None = None
        self._live: Live | None = None
        self._lock = threading.RLock()  # one writer at a time: rich alone lets two threads' redraws cross
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="console", daemon=True)

    def __enter__(self) -> Self:
        if is_live(self._stream):
            self._terminal = CapturedTerminal(self._stream, self._print_above)
            console = rich.console.Console(file=self._terminal.file, force_terminal=True, highlight=False)
            # The descriptors are led through a pipe instead of rich's stand-ins for sys.stdout and sys.stderr.
            self._live = Live(
                console=console,
                auto_refresh=False,
                get_renderable=self._render,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._terminal.__enter__()
            self._live.start()
            console.show_cursor(True)  # rich hides it, and a killed run could not show it again
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal is None:
            return
        self._ended.set()
        self._ticker.join()
        self._terminal.release()  # shows what is still under way, so the table must still be there
        self._phase = ""
        with self._lock, contextlib.suppress(OSError):  # the terminal may be gone
            if self._live is not None:
                self._live.stop()
        self._live = None
        self._terminal.__exit__(kind, error, trace)
        self._terminal = None

    def say(self, text: object) -> None:
        """One plain line; above the table on a terminal."""
        if self._terminal is None:
            self._write_line(plain_text(text))
        else:
            self._print_above(plain_text(text))

    def phase(self, text: object) -> None:
        """What the run does or waits for now: the last line of the table. Plain output leaves it out."""
        words = plain_text(text)
        if words != self._phase:
            self._phase, self._phase_since = words, time.monotonic()
        self._refresh()

    def step(self, metrics: dict[str, Any]) -> None:
        """A finished step: a row of the table, or one plain line."""
        number = finite(metrics.get("step"))
        self._num_done = self._num_done + 1 if number is None else int(number) + 1
        self._rows.append({**metrics, "step": self._num_done})
        seconds = finite(metrics.get("seconds"))
        if seconds is not None:
            self._seconds.append(seconds)
        if self._terminal is None:
            self._write_line(self._step_line(self._rows[-1]))
        self._refresh()

    def evaluation(self, step: int, accuracy: float | None) -> None:
        """A held-out evaluation after `step` updates."""
        value = finite(accuracy)
        if value is None:
            return
        self._accuracies = [*self._accuracies[:1], (step, value)]
        if self._terminal is None:
            self._write_line(f"held-out accuracy {value:.3f} after {step} of {self._num_steps} steps")
        self._refresh()

    def time_left_s(self) -> float | None:
        """Seconds to the end: the median of the last ten steps, times the steps left; None before the first step."""
        if not self._seconds:
            return None
        return statistics.median(self._seconds) * max(0, self._num_steps - self._num_done)

    def _write_line(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._lock:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()

    def _print_above(self, text: str) -> None:
        self._draw(lambda live: live.console.print(Text(text), soft_wrap=True))

    def _refresh(self) -> None:
        self._draw(Live.refresh)

    def _draw(self, action: Callable[[Live], None]) -> None:
        """Nothing any more once the terminal is gone (a closed window): the run goes on, its folder has the numbers."""
        with self._lock:
            if self._live is None:
                return
            try:
                action(self._live)
            except OSError:
                self._live = None

    def _tick(self) -> None:
        while not self._ended.wait(_REDRAW_S):
            self._refresh()

    def _step_line(self, row: dict[str, Any]) -> str:
        parts = [f"step {row['step']} of {self._num_steps}"]
        parts += [column.word.format(text) for column in _COLUMNS if (text := _cell(row, column))]
        left = self.time_left_s()
        return "  ".join(parts if left is None else [*parts, f"{duration(left)} left"])

    def _render(self) -> RenderableType:
        columns, lines = self._terminal.size() if self._terminal else (80, 24)
        if self._live is not None:
            # Left to itself, rich asks descriptors 0 to 2, which may lead elsewhere.
            self._live.console.size = rich.console.ConsoleDimensions(columns, lines)
        parts: list[RenderableType] = [self._table(columns, max(1, lines - _LINES_AROUND))] if self._rows else []
        parts.append(self._progress(columns))
        if self._accuracies:
            parts.append(Text(self._accuracy_line(), overflow="ellipsis", no_wrap=True))
        if self._phase:
            parts.append(Text(self._phase_line(), style="dim", overflow="ellipsis", no_wrap=True))
        return rich.console.Group(*parts)

    def _table(self, columns: int, max_rows: int) -> Table:
        shown = _fitting_columns(columns)
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("\nstep", justify="right", width=max(4, len(str(self._num_steps))), no_wrap=True)
        for column in shown:
            table.add_column(column.title, justify="right", width=column.width, no_wrap=True)
        for row in list(self._rows)[-max_rows:]:
            table.add_row(str(row["step"]), *(_cell(row, column) or "-" for column in shown))
        return table

    def _progress(self, columns: int) -> RenderableType:
        left = self.time_left_s()
        words = f"step {self._num_done} of {self._num_steps}" + (f"  {duration(left)} left" if left else "")
        grid = Table.grid(padding=(0, _GAP, 0, 0))
        bar = ProgressBar(total=max(1, self._num_steps), completed=self._num_done, width=max(4, min(40, columns // 3)))
        grid.add_row(bar, Text(words, no_wrap=True))
        return grid

    def _accuracy_line(self) -> str:
        (step, value), *rest = self._accuracies
        return f"held-out accuracy {value:.3f} after {step} steps" + "".join(f", {v:.3f} after {s}" for s, v in rest)

    def _phase_line(self) -> str:
        if re.search(r"\d s$", self._phase):  # the caller counts by itself
            return self._phase
        return f"{self._phase} {time.monotonic() - self._phase_since:.0f} s"


def duration(seconds: float) -> str:
    """Seconds in a person's words: 42 s, 3 min 05 s, 2 h 04 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def finite(value: Any) -> float | None:
    """The value as a finite float; None where it is missing, not a number, NaN or infinite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _cell(row: dict[str, Any], column: Column) -> str:
    number = finite(row.get(column.key))
    return "" if number is None else format(number, column.form)


def _fitting_columns(columns: int) -> list[Column]:
    """The columns that fit beside the step in a terminal this wide; the highest ranks go first."""
    shown = sorted(_COLUMNS, key=lambda column: column.rank)
    while len(shown) > 1 and 8 + _GAP + sum(column.width + _GAP for column in shown) > columns + _GAP:
        shown.pop()
    return [column for column in _COLUMNS if column in shown]
