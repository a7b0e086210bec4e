"""The terminal behind a live table: lines that other libraries print are caught and shown above it.

Python's loggers keep the stream they were made with, and C++ code and child processes write to the file descriptors
1 and 2 directly, so replacing sys.stdout is not enough: the descriptors are led through a pipe while the table lives.
"""

import codecs
import contextlib
import os
import re
import select
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

# Escape sequences (CSI, OSC, two-character ones) and control characters except tab, line feed and carriage return.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_MAX_PENDING = 65_536  # characters of a line without an end that are held before it is shown all the same


def plain_text(text: object) -> str:
    """The text on one line, without control characters or escape sequences."""
    return " ".join(_CONTROL.sub("", str(text)).split())


def is_live(stream: TextIO) -> bool:
    """True where a table can be redrawn in place: a terminal, TERM is not dumb, NO_COLOR is unset or empty."""
    try:
        terminal = stream.isatty()
        stream.fileno()
    except (OSError, ValueError):  # closed, or a stream without a descriptor
        return False
    return terminal and os.environ.get("TERM", "") not in ("", "dumb", "unknown") and not os.environ.get("NO_COLOR")


class CapturedTerminal:
    """A private way to the terminal of `stream`, while descriptors 1 and 2 that lead there go line by line to `show`.

    A descriptor that leads elsewhere (2> log) is left alone. On exit both are put back and what was written is shown;
    a child process that still holds the pipe then gets a broken pipe.
    """

    def __init__(self, stream: TextIO, show: Callable[[str], None]) -> None:
        self._stream = stream
        self._show = show
        self._saved: dict[int, int] = {}  # descriptor -> the copy to put back
        self._pump: threading.Thread | None = None
        self._reader = self._stop_reader = self._stop_writer = -1
        self.file = open(os.dup(stream.fileno()), "w", encoding=stream.encoding or "utf-8", errors="replace")  # noqa: SIM115

    def size(self) -> os.terminal_size:
        """Columns and lines now; 80 by 24 where the terminal does not know."""
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except OSError:
            columns, lines = 0, 0
        return os.terminal_size((columns or 80, lines or 24))

    def __enter__(self) -> Self:
        self._stream.flush()
        target = os.fstat(self.file.fileno())
        caught = [descriptor for descriptor in (1, 2) if _leads_to(descriptor, target)]
        if caught:
            self._reader, writer = os.pipe()
            self._stop_reader, self._stop_writer = os.pipe()
            for descriptor in caught:
                self._saved[descriptor] = os.dup(descriptor)
                os.dup2(writer, descriptor)
            os.close(writer)
            self._pump = threading.Thread(target=self._copy_lines, name="terminal", daemon=True)
            self._pump.start()
        return self

    def release(self) -> None:
        """Put the descriptors back; shows what was still under way in the pipe. Twice is the same as once."""
        for descriptor, copy in self._saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        self._saved.clear()
        if self._pump is not None:
            os.close(self._stop_writer)
            self._pump.join()  # unblocked by the closed stop pipe; never waits for other holders of the pipe
            self._pump = None
            os.close(self._reader)
            os.close(self._stop_reader)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        with contextlib.suppress(OSError):  # the terminal is gone, and with it what was not yet written
            self.file.close()

    def _copy_lines(self) -> None:
        """Waits for: bytes in the pipe, or the stop pipe's end. Ends once stopped and the pipe is empty."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pending = ""
        while True:
            ready, _, _ = select.select([self._reader, self._stop_reader], [], [])
            if self._reader not in ready:
                break
            data = os.read(self._reader, 65_536)
            if not data:
                break
            *lines, pending = (pending + decoder.decode(data)).split("\n")
            if len(pending) > _MAX_PENDING:
                lines, pending = [*lines, pending], ""
            self._show_lines(lines)
        self._show_lines([pending])

    def _show_lines(self, lines: list[str]) -> None:
        for line in lines:
            # A progress bar redraws its line after a carriage return: what counts is what stood there last.
            last = line.rstrip("\r").rpartition("\r")[2]
            text = _CONTROL.sub("", last).expandtabs().rstrip()
            if text:
                self._show(text)


def _leads_to(descriptor: int, target: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), target)
    except OSError:  # closed
        return False
