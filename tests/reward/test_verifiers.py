import pytest

from core.errors import UserError
from reward.number import last_number
from reward.verifiers import checked_pattern, exact_scores, last_number_scores, matches

pytestmark = pytest.mark.fast

BAIT = [
    r"\boxed{__import__('os').system('touch pwned')}",
    r"\boxed{\pi + __import__('os').system('touch pwned')}",
    r"\begin{pmatrix} __import__('os').system('touch pwned') \end{pmatrix}",
    "{{7*7}}",
    "$(touch pwned)",
    "cos\nsystem\n(S'touch pwned'\ntR.",
]


def test_exact_ignores_outer_white_space_only() -> None:
    assert exact_scores(" yes\r\n", ("yes", "yes\n", "Yes", "y es", "")) == [1, 1, 0, 0, 0]


def test_the_last_number_decides() -> None:
    assert last_number_scores("1000", ("It is 1,000.", "1000 or 7", "no idea", "1,2"), "r1") == [1, 0, 0, 0]


def test_a_comma_that_does_not_group_is_not_stripped() -> None:
    assert last_number_scores("12", ("1,2",), "r1") == [0]
    assert last_number_scores("1", ("0,1",), "r1") == [0]
    assert last_number_scores("1234", ("12,34",), "r1") == [0]


def test_a_reference_behind_hash_marks_is_the_reference() -> None:
    assert last_number_scores("6 * 7 = 42\n#### 42", ("42", "6"), "r1") == [1, 0]


@pytest.mark.parametrize("answer", ["", "forty", "(0,1)", "5 apples", *BAIT])
def test_a_reference_that_is_no_number_is_an_error_with_the_row(answer: str) -> None:
    with pytest.raises(UserError, match="answer of row r17 must be a number for reward kind last_number, got"):
        last_number_scores(answer, ("1",), "r17")


def test_bait_is_scored_as_text_and_runs_nowhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert last_number_scores("49", (*BAIT, "49", "48"), "r1") == [0] * len(BAIT) + [1, 0]
    assert exact_scores("49", (*BAIT, "49", "48")) == [0] * len(BAIT) + [1, 0]
    assert [matches("49", bait) for bait in BAIT] == [0] * len(BAIT)
    assert last_number("{{7*7}}") == 7  # the last number written, not the product
    assert list(tmp_path.iterdir()) == []


def test_a_match_is_compared_as_a_number_where_both_are_numbers() -> None:
    assert matches("1000", "1,000") == 1
    assert matches("1000", "1,00") == 0
    assert matches(" blue ", "blue") == 1
    assert matches("7", "seven") == 0
    assert matches("", None) == 0  # the group took no part in the match


@pytest.mark.parametrize("pattern", ["(", "a{2,1}(b)", "(?P<x>a)(?P<x>b)", "*"])
def test_a_broken_pattern_is_an_error_with_its_key(pattern: str) -> None:
    with pytest.raises(UserError, match=r"reward.terms\[0\].pattern must be a regular expression, got"):
        checked_pattern(pattern, "reward.terms[0].pattern")


def test_a_pattern_without_a_group_is_an_error() -> None:
    with pytest.raises(UserError, match="must hold a group in round brackets"):
        checked_pattern(r"\d+", "reward.terms[0].pattern")
