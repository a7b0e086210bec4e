import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward.child import Child, ChildEnded, ChildSilent
from tests.reward.processes import gone_within, is_running

PROJECT = Path(__file__).resolve().parents[2]


def test_children_die_with_a_parent_killed_by_force_even_stuck_in_c(tmp_path: Path) -> None:
    pids, rewards, parent = tmp_path / "pids", tmp_path / "rewards.py", tmp_path / "parent.py"
    rewards.write_text(
        "import os, re, signal, subprocess\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "def score(prompt_id, answer, text):\n"
        "    helper = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{helper.pid}}\\n')\n"
        "    while text == 'spin': pass\n"
        "    if text == 'stick': re.match('(a+)+$', 'a' * 60 + 'b')\n"
        "    return 1\n"
    )
    parent.write_text(
        "import time\nfrom reward.child import Child\nchildren = [Child(), Child(), Child()]\n"
        "for child, text in zip(children, ['idle', 'spin', 'stick']):\n"
        f"    child.send({{'path': {str(rewards)!r}, 'function': 'score'}}, 9)\n"
        "    child.send({'prompt_id': 'r1', 'answer': '4', 'samples': [0], 'texts': [text]}, 9)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(parent)], env=os.environ | {"PYTHONPATH": str(PROJECT)})
    try:
        deadline = time.monotonic() + 30
        while not pids.exists() or pids.read_text().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        started = [int(pid) for pid in pids.read_text().split()]  # three children, a helper each
        assert all(is_running(pid) for pid in started)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(started) == 6
    assert all(gone_within(pid, 5.0) for pid in started)


def test_a_child_that_is_killed_says_how_it_ended() -> None:
    child = Child()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChildEnded, match="its process was ended by SIGKILL"):
        child.receive(9.0)
    child.close()


def test_a_stopped_child_takes_no_large_message_and_the_wait_ends() -> None:
    child = Child()
    os.kill(child.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ChildSilent):
        child.send({"pattern": "x" * 1_000_000}, 0.2)  # more than a pipe holds
    assert time.monotonic() - started < 2.0
    child.close()
    assert not is_running(child.pid)


def test_a_child_that_is_forgotten_is_ended() -> None:
    pid = Child().pid
    assert not is_running(pid)
