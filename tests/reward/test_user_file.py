import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reward.user_file import Mistake, form_of, load_function

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in [name for name in sys.modules if name.startswith("user_reward_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "def scor(prompt_id, answer, text): ...\n",
            r"must hold a function score, got a file without one .* it has scor$",
        ),
        ("x = 1\n", r"it has no function$"),
        ("score = 3\n", r"must hold a function score, got 3 of type int"),
        ("def score(text): ...\n", r"got score\(text\) \(.*rewards.py line 1\)"),
        ("\ndef score(a, b, completion): ...\n", r"got score\(a, b, completion\) \(.*rewards.py line 2\)"),
        ("def score(a, b, text, d): ...\n", r"got score\(a, b, text, d\)"),
        ("def score(*, prompt_id, answer, text): ...\n", r"got score\(\*, prompt_id, answer, text\)"),
        ("import nonsense_module\n", r"ModuleNotFoundError: No module named 'nonsense_module' \(.*rewards.py line 1\)"),
        ("x = 1\ny = x / 0\n", r"must import without an error, got ZeroDivisionError.* \(.*rewards.py line 2\)"),
        ("def score(:\n", r"SyntaxError: .* \(.*rewards.py line 1\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(.*rewards.py line 2\)"),
        (
            "class E(Exception):\n    __str__ = None\nraise E\n",
            r"E: \(its text could not be read: TypeError\) \(.* line 3\)",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_file_and_line(tmp_path: Path, source: str, sentence: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(source)
    with pytest.raises(Mistake, match=sentence):
        form_of(load_function(str(file), "score"), str(file))


def test_a_file_finds_its_neighbours_and_its_own_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("BONUS = 3\n")
    file = tmp_path / "my rewards-2"  # no .py, no identifier
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_rewards import BONUS\n"
        "@dataclass\nclass Part:\n    value: int\ndef score(prompt_id, answer, text):\n    return Part(BONUS).value\n"
    )
    assert load_function(str(file), "score")("r1", "4", "x") == 3


def test_the_third_parameters_name_decides_the_form() -> None:
    class Callable_:
        def __call__(self, prompt_id, answer, texts, limit=3): ...

    def plain(row_id, script, text, *, k=2): ...

    assert form_of(plain, "f.py") == "text"
    assert form_of(Callable_(), "f.py") == "texts"
    assert form_of(functools.partial(plain, k=3), "f.py") == "text"
