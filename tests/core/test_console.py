"""The live table is watched through real pseudo-terminals and a small emulator; plain lines through a StringIO."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

from core.console import Console, duration, finite
from core.terminal import plain_text

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[2]
METRICS = {
    "reward_mean": 0.4123,
    "heldout_accuracy": None,
    "entropy": 1.5,
    "rollout_tokens_per_s": 1234.4,
    "learner_tokens_per_s": 987.6,
    "staleness_mean": 0.5,
    "mean_abs_logprob_difference": 0.00213,
    "seconds": 4.0,
}


class Screen:
    """The lines a terminal of a given width shows after some bytes; knows what a redrawn table needs."""

    _TOKEN = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([\x00-\x1f])|([^\x00-\x1f]+)")

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0
        self.seen: set[str] = set()  # every character that was drawn, to know plain from live

    def feed(self, text: str) -> "Screen":
        for argument, command, control, words in self._TOKEN.findall(text):
            if command == "A":
                self.row = max(0, self.row - int(argument or 1))
            elif command == "K":
                self.lines[self.row] = ""
            elif control == "\r":
                self.column = 0
            elif control == "\n":
                self._go_down()
            for character in words:
                self._put(character)
        return self

    def _put(self, character: str) -> None:
        if self.column == self.columns:  # a terminal wraps what is too wide
            self._go_down()
            self.column = 0
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _go_down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


def watch(script: str, columns: int = 80, lines: int = 30, **environment: str) -> tuple[str, int]:
    """What a program writes to its terminal, and its exit status."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    program = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**clean, "TERM": "xterm-256color", **environment},
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    written, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                data = os.read(leader, 65536)
            except OSError:  # Linux says EIO when the last writer is gone
                break
            written += data
    os.close(leader)
    return written.decode(), program.wait(timeout=10)


STEPS = f"""
import os, subprocess, sys, time
from core.console import Console
METRICS = {METRICS!r}
"""


def plain(num_steps: int = 10, start_step: int = 0) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(num_steps, start_step, stream), stream


def test_a_stream_that_is_no_terminal_gets_one_plain_line_a_step():
    console, stream = plain()
    with console:
        console.phase("step 1: sampling")
        console.step({"step": 0, **METRICS})
        console.evaluation(5, 0.25)
        console.say("saved\n a\tcheckpoint \x1b[31mred\x1b[0m\x07")
    # 9 steps are left after the first, at 4 s each.
    assert stream.getvalue().splitlines() == [
        "step 1 of 10  reward 0.412  entropy 1.500  rollout 1,234 tokens/s  learner 988 tokens/s  staleness 0.50  "
        "mismatch 0.0021  4.0 s/step  36 s left",
        "held-out accuracy 0.250 after 5 of 10 steps",
        "saved a checkpoint red",
    ]


@pytest.mark.parametrize(
    "metrics",
    [{}, {"step": None}, {"step": 0, "reward_mean": None, "seconds": None}, {"reward_mean": "soon", "entropy": [1]}],
)
def test_missing_and_unusable_metrics_are_left_out(metrics):
    console, stream = plain()
    with console:
        console.step(metrics)
        console.step({name: float("nan") for name in METRICS})
        console.evaluation(0, None)
    assert stream.getvalue() == "step 1 of 10\nstep 2 of 10\n"


def test_a_resumed_run_goes_on_counting_from_its_start():
    console, stream = plain(num_steps=10, start_step=7)
    console.step({})
    console.step({"step": 8})
    assert stream.getvalue() == "step 8 of 10\nstep 9 of 10\n"


def test_the_time_left_is_the_median_of_the_last_ten_steps_times_the_rest():
    console, _ = plain(num_steps=100)
    assert console.time_left_s() is None
    for step, seconds in enumerate([900.0, 1, 1, 1, 1, 2, 3, 4, 4, 4, 400]):
        console.step({"step": step, "seconds": seconds})
    # The last ten are 1 1 1 1 2 3 4 4 4 400: the median is (2 + 3) / 2; 100 - 11 = 89 steps are left.
    assert console.time_left_s() == pytest.approx(2.5 * 89)
    console.step({"step": 150})  # beyond the planned end
    assert console.time_left_s() == 0


def test_a_stream_that_cannot_write_a_character_gets_a_stand_in():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="")
    Console(3, stream=stream).say("naïve")
    assert raw.getvalue() == b"na?ve\n"


def test_the_live_table_shows_the_newest_ten_steps_progress_accuracy_and_phase():
    text, status = watch(
        STEPS
        + """
with Console(40) as console:
    console.evaluation(0, 0.125)
    for step in range(12):
        console.phase(f"step {step + 1}: waiting for 4 of 16 groups (rollout-0)")
        console.step({"step": step, **METRICS})
    console.evaluation(12, 0.5)
    print("MARK")
    time.sleep(0.1)
    os._exit(0)
"""
    )
    assert status == 0
    screen = Screen(80).feed(text).text
    rows = [line.split() for line in screen.splitlines() if re.match(r" +\d+  ", line)]
    assert rows == [[str(k), "0.412", "-", "1.500", "1,234", "988", "0.50", "0.0021", "4.0"] for k in range(3, 13)]
    # 28 steps are left, 4 s each: 112 s.
    assert re.search(r"^\S+ +step 12 of 40  1 min 52 s left$", screen, re.M)
    assert "held-out accuracy 0.125 after 0 steps, 0.500 after 12" in screen
    assert re.search(r"^step 12: waiting for 4 of 16 groups \(rollout-0\) 0 s$", screen, re.M)
    assert "MARK" in screen


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_no_line_of_the_table_is_wider_than_the_terminal(columns):
    text, _ = watch(
        STEPS
        + """
with Console(12345) as console:
    console.evaluation(0, 0.125)
    console.evaluation(12000, 0.5)
    console.phase("step 1: waiting for 4 of 16 groups (rollout-0) and for very many other things besides")
    console.step({"step": 12343, **METRICS, "seconds": 12345})
""",
        columns=columns,
    )
    # A line that is too wide would be cut into two by the emulator, as by a terminal.
    lines = Screen(columns).feed(text).lines
    header = next(k for k, line in enumerate(lines) if re.match(r" +step ", line))
    assert lines[header + 1].split()[:2] == ["12344", "0.412"]
    assert re.match(r"\S+ +step 12344 of 123", lines[header + 2])
    assert lines[header + 3].startswith("held-out accuracy 0.125")
    assert [line for line in lines[header + 4 :] if line.strip()] == []
    assert ("mismatch" in lines[header]) == (columns >= 80)


def test_foreign_output_appears_above_the_table_and_does_not_tear_it():
    text, _ = watch(
        STEPS
        + """
import logging
handler = logging.StreamHandler(sys.stderr)  # keeps the stream it was made with
with Console(20) as console:
    for step in range(3):
        console.phase(f"phase-{step}")
        print(f"print-{step}")
        logging.getLogger().handlers = [handler]
        logging.warning(f"log-{step}")
        os.write(2, f"descriptor-{step}\\n".encode())
        subprocess.run(["sh", "-c", f"echo child-{step}; printf '50%%\\\\r\\\\033[2K100%%-{step}\\\\n' >&2"])
        console.say(f"say-{step}")
        console.step({"step": step, **METRICS})
        time.sleep(0.05)
    os.write(1, b"without an end")
print("after")
"""
    )
    lines = [line for line in Screen(80).feed(text).text.splitlines() if line]
    header = next(k for k, line in enumerate(lines) if "reward" in line)
    words = ("print", "log", "descriptor", "child", "say", "100%")
    assert sorted(lines[:header]) == sorted([f"{word}-{k}" for word in words for k in range(3)] + ["without an end"])
    assert [line.split()[0] for line in lines[header + 2 : header + 5]] == ["1", "2", "3"]
    assert "step 3 of 20" in lines[header + 5]
    assert lines[header + 6 :] == ["after"]  # no phase line is left behind, and descriptor 1 is the terminal again


def test_a_long_wait_is_counted_on_the_phase_line_and_the_cursor_is_left_on():
    text, _ = watch(
        STEPS
        + """
with Console(20) as console:
    console.phase("loading the model")
    time.sleep(1.3)
"""
    )
    assert "loading the model 1 s" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_a_phase_with_its_own_seconds_is_not_counted_twice():
    text, _ = watch(STEPS + "with Console(20) as console: console.phase('waiting for rollout-0 12 s')")
    assert "rollout-0 12 s" in text
    assert "12 s 0 s" not in text


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_a_dumb_or_colourless_terminal_gets_plain_lines(environment):
    text, _ = watch(STEPS + "with Console(2) as console: console.step({'step': 0})", **environment)
    assert text == "step 1 of 2\r\n"


def test_an_error_inside_puts_the_terminal_back_before_it_is_shown():
    text, status = watch(
        STEPS
        + """
with Console(20) as console:
    console.step({"step": 0, **METRICS})
    raise ValueError("the cause")
"""
    )
    assert status == 1
    assert Screen(80).feed(text).text.rstrip().endswith("ValueError: the cause")


def test_errors_redirected_to_a_file_stay_there(tmp_path):
    text, _ = watch(
        STEPS
        + f"""
os.dup2(os.open({str(tmp_path / "log")!r}, os.O_CREAT | os.O_WRONLY), 2)
with Console(20) as console:
    os.write(2, b"to the file")
"""
    )
    assert (tmp_path / "log").read_text() == "to the file"
    assert "to the file" not in text


def test_a_closed_terminal_does_not_end_the_run(tmp_path):
    leader, follower = pty.openpty()
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            STEPS
            + f"""
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with Console(20) as console:
    console.step({{"step": 0, **METRICS}})
    time.sleep(1)
    os.write(2, b"foreign\\n" * 20000)  # more than a pipe holds
    console.step({{"step": 1, **METRICS}})
open({str(tmp_path / "ended")!r}, "w").close()
""",
        ],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": ""},
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    shown = b""
    while b"step 1 of 20" not in shown:
        shown += os.read(leader, 65536)
    os.close(leader)
    assert program.wait(timeout=30) == 0
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (3599.6, "1 h 00 min"), (7440, "2 h 04 min")],
)
def test_durations_read_as_a_person_says_them(seconds, words):
    assert duration(seconds) == words


def test_only_finite_numbers_are_numbers():
    assert finite("0.5") == 0.5
    assert [finite(value) for value in (None, "x", float("inf"), float("nan"), [], 10**400)] == [None] * 6


def test_plain_text_holds_no_control_sequences():
    assert plain_text("a\x1b]0;title\x07b\x1b[2Kc\x00\r\nd\x9b1m") == "abc d1m"
