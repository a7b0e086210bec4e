import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from core.config import RewardConfig, RewardTerm
from core.errors import DeadlineExceeded, RunBroken, UserError
from core.trajectory import Group
from reward.user_function import UserFunction
from tests.reward.processes import gone_within, is_running

Make = Callable[..., UserFunction]


def group_of(*text: str) -> Group:
    count = len(text)
    return Group(
        group_id="0:r1:0",
        prompt_id="r1",
        answer="4",
        prompt_tokens=np.zeros(1, np.int32),
        tokens=np.zeros(count, np.int32),
        offsets=np.arange(count + 1, dtype=np.int64),
        behavior_logprobs=np.zeros(count, np.float32),
        version=np.zeros(count, np.int32),
        finish_reason=("stop",) * count,
        loss_mask=np.ones(count, bool),
        cluster=0,
        cluster_version=0,
        text=text,
    )


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes the function of a file with the given source; ends their processes afterwards."""
    made: list[UserFunction] = []

    def from_source(source: str, name: str = "score", **limits: float) -> UserFunction:
        file = tmp_path / "rewards.py"
        file.write_text(source)
        config = RewardConfig.model_validate({"retry_backoff_s": 0.02, "time_limit_s": 5.0, **limits})
        made.append(UserFunction(RewardTerm(kind="python", path=file, function=name), 0, config))
        return made[-1]

    yield from_source
    for function in made:
        function.close()


ONE = "def score(prompt_id, answer, text):\n"
ALL = "def score(prompt_id, answer, texts):\n"


def test_a_function_of_one_text_is_called_in_order_in_one_lasting_process(make: Make) -> None:
    function = make(
        "import os\ncalls = []\n" + ONE + "    assert (prompt_id, answer) == ('r1', '4')\n"
        "    calls.append(text)\n    print('noise', text)\n    os.write(1, b'{\"done\": true}\\n')\n"
        "    return len(calls) + len(text) / 10\n"
    )
    function.check()
    assert function.scores(group_of("a", "bb")) == [1.1, 2.2]
    assert function.scores(group_of("ccc")) == [3.3]  # the third call of the same process


def test_a_function_of_all_texts_is_called_once(make: Make) -> None:
    function = make(
        "calls = []\n" + ALL + "    calls.append(1)\n    return [len(t) + 10 * len(calls) for t in texts]\n"
    )
    assert function.scores(group_of("a", "bb")) == [11, 12]


def test_the_first_two_parameters_may_have_any_name_and_more_may_have_defaults(make: Make) -> None:
    assert make("def score(row_id, script, text, *, k=2):\n    return k\n").scores(group_of("a")) == [2]


def test_async_functions_score_all_samples_at_once(make: Make) -> None:
    function = make("import asyncio\nasync " + ONE + "    await asyncio.sleep(0.4)\n    return float(text)\n")
    function.check()
    started = time.monotonic()
    assert function.scores(group_of("1", "2", "3", "4", "5", "6", "7", "8")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert time.monotonic() - started < 2.4  # one after the other it would be 3.2 s
    assert make("async " + ALL + "    return [1] * len(texts)\n").scores(group_of("a", "b")) == [1, 1]


def test_the_wrong_value_is_shown_and_the_next_group_is_not_confused_by_it(make: Make) -> None:
    function = make(f"{ONE}    return None if text == 'b' else float(text)\n")
    with pytest.raises(RunBroken, match="got None"):
        function.scores(group_of("7", "b", "8"))
    assert function.scores(group_of("1", "2", "3")) == [1, 2, 3]


def test_a_wrong_count_is_never_spread_or_padded(make: Make) -> None:
    with pytest.raises(RunBroken, match=r"one finite number a sample, got 1 scores for 4 samples \(group 0:r1:0\)"):
        make(f"{ALL}    return [1.0]\n").scores(group_of(*"abcd"))


def test_a_mistake_in_the_file_is_a_sentence_with_key_file_and_line(make: Make) -> None:
    sentence = r"^reward.terms\[0\].path must hold a function score.* got score\(a, b\) \(.*rewards.py line 2\)"
    with pytest.raises(UserError, match=sentence):
        make("\ndef score(a, b): ...\n").check()


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    term = RewardTerm(kind="python", path=tmp_path / "none.py")
    with pytest.raises(UserError, match=r"reward.terms\[0\].path must be an existing file, got .*none.py"):
        UserFunction(term, 0, RewardConfig()).check()


def test_a_failed_call_is_repeated_for_the_missing_samples_only(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = (
        f"failed = []\n{ONE}    open({str(log)!r}, 'a').write(text)\n"
        "    if text == 'b' and not failed:\n        failed.append(1)\n        raise OSError('500')\n"
        "    return ord(text)\n"
    )
    assert make(source, max_retries=1).scores(group_of("a", "b", "c")) == [97, 98, 99]
    assert log.read_text() == "abcb"


def test_the_first_cause_is_told_after_bounded_tries(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = (
        f"{ONE}    open({str(log)!r}, 'a').write('x')\n"
        f"    raise ValueError('try ' + str(len(open({str(log)!r}).read())))\n"
    )
    with pytest.raises(
        RunBroken, match=r"got 3 failed tries .*first cause: ValueError: try 1 \(.*line 3\), sample 0 of"
    ):
        make(source, max_retries=2).scores(group_of("a"))
    assert log.read_text() == "xxx"


def test_a_file_that_exits_on_import_is_started_a_bounded_number_of_times(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    function = make(f"import os\nopen({str(log)!r}, 'a').write('x')\nos._exit(1)\n", max_retries=2)
    with pytest.raises(
        RunBroken, match=r"got 3 failed tries .*first cause: its process exited with status 1 while it was"
    ):
        function.check()
    assert log.read_text() == "xxx"


@pytest.mark.parametrize(
    ("crash", "cause"),
    [
        ("os._exit(7)", "its process exited with status 7"),
        ("os.kill(os.getpid(), 11)", "its process was ended by SIGSEGV"),
        ("os.closerange(3, 100)", "its process closed its pipes"),
    ],
)
def test_a_crash_is_the_childs_own_and_names_the_sample(make: Make, crash: str, cause: str) -> None:
    function = make(
        f"import os, time\n{ONE}    if text == 'b':\n        {crash}\n        time.sleep(9)\n    return 1\n",
        max_retries=0,
    )
    with pytest.raises(RunBroken, match=f"first cause: {cause}, sample 1 of group 0:r1:0"):
        function.scores(group_of("a", "b"))
    assert function.scores(group_of("a", "c")) == [1, 1]


@pytest.mark.parametrize(
    "hang",
    ["while True: pass", "time.sleep(600)", "re.match(r'(a+)+$', 'a' * 60 + 'b')", "os.kill(os.getpid(), 19)"],
)
def test_a_hang_is_ended_by_the_time_limit_with_all_it_started(make: Make, tmp_path: Path, hang: str) -> None:
    pids = tmp_path / "pids"
    source = (
        f"import os, re, subprocess, time\n{ONE}    if text == 'b':\n"
        f"        helper = subprocess.Popen(['sleep', '600'])\n"
        f"        open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{helper.pid}}')\n        {hang}\n    return 1\n"
    )
    function = make(source, time_limit_s=0.4)
    function.check()
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"got nothing for sample 1 of group 0:r1:0 in 0.4 s.*reward.time_limit_s"
    ):
        function.scores(group_of("a", "b", "c"))
    assert time.monotonic() - started < 3.0
    for pid in map(int, pids.read_text().split()):
        assert gone_within(pid, 2.0)
    assert function.scores(group_of("a")) == [1]


def test_a_slow_function_within_the_limit_of_each_sample_is_let_be(make: Make) -> None:
    # three samples of 0.3 s each: longer together than the limit of one
    assert (
        make(f"import time\n{ONE}    time.sleep(0.3)\n    return 1\n", time_limit_s=0.6).scores(group_of(*"abc"))
        == [1] * 3
    )
    batch = make(f"import time\n{ALL}    time.sleep(0.9)\n    return [1] * len(texts)\n", time_limit_s=0.6)
    assert batch.scores(group_of(*"abc")) == [1] * 3


def test_an_import_that_hangs_is_ended_by_its_own_limit(make: Make) -> None:
    with pytest.raises(DeadlineExceeded, match=r"must load within 0.5 s.*reward.import_limit_s"):
        make("import time\ntime.sleep(600)\n", import_limit_s=0.5).check()


def test_a_large_group_passes_the_pipes_both_ways(make: Make) -> None:
    function = make(f"{ONE}    return len(text)\n")
    assert function.scores(group_of("x" * 3_000_000, "y" * 10)) == [3_000_000, 10]


def test_close_ends_the_process_and_lets_it_finish_first(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    function = make(
        f"import atexit, os\natexit.register(lambda: open({str(log)!r}, 'w').write('ended'))\n"
        f"{ONE}    return os.getpid()\n"
    )
    (pid,) = function.scores(group_of("a"))
    function.close()
    assert not is_running(int(pid))
    assert log.read_text() == "ended"


def test_the_limit_holds_in_a_thread_that_is_not_the_main_one(make: Make) -> None:
    function = make(
        f"import os\n{ONE}    return os.getpid() if text != 'hang' else __import__('time').sleep(600)\n",
        time_limit_s=0.4,
    )

    async def in_threads() -> list[float]:
        first = await asyncio.to_thread(function.scores, group_of("a"))
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(function.scores, group_of("hang"))
        return first + await asyncio.to_thread(function.scores, group_of("a"))

    before, after = asyncio.run(in_threads())
    assert before != after  # killed, and started again
