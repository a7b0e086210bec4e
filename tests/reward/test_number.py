import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward.number import last_number, whole_number

pytestmark = pytest.mark.fast

# (one side, other side, equal?): plain numbers on both sides
PLAIN = [
    ("1,000", "1000", True),
    ("$1,234.00", "1234", True),
    ("-7", "7", False),
    ("\u22127", "-7", True),  # U+2212 minus
    ("\uff0d7", "-7", True),  # full-width minus
    ("+5", "5", True),
    ("3.0", "3", True),
    ("0.5", "1/2", True),
    (".5", "1/2", True),
    ("1e3", "1000", True),
    ("1E+3", "1000", True),
    (r"1.5 \times 10^{3}", "1500", True),
    ("1e-2", "0.01", True),
    (r"\frac{1}{2}", r"\frac12", True),
    (r"-\dfrac{1}{3}", "-1/3", True),
    ("1/3", "0.333333", False),  # a third is no finite decimal
    ("2/6", "1/3", True),
    ("1/3", "2/3", False),
    ("1 1/2", "1.5", True),
    ("-1 1/2", "-1.5", True),
    (r"1\frac{1}{2}", "1.5", True),
    ("1\u00bd", "1.5", True),  # one and the character for a half
    ("-1/2", "1/-2", True),
    ("1,000/2", "500", True),
    ("**73**", "73", True),
    (r"\text{13}", "13", True),
    (r"\boxed{42}", "42", True),
    ("42.", "42", True),
    ("042", "42", True),
    ("10", "1", False),
    ("100", "10", False),
    ("\uff14\uff12", "42", True),  # full-width digits
    ("1\u2009000", "1000", True),  # thin space
    ("1\u202f234\u202f567", "1234567", True),
    (r"1{,}000", "1000", True),
    (r"1\,000", "1000", True),
    ("50%", "50", True),
    (r"50\%", "50", True),
    ("-$5", "$-5", True),
    ("\u20ac3", "3", True),
    ("-0", "0", True),
    ("1e999999999", "10e999999998", True),  # never written out
    ("1e999999999", "2e999999999", False),
]


@pytest.mark.parametrize(("left", "right", "equal"), PLAIN)
def test_plain_numbers_compare_exactly_and_the_same_on_swapping_sides(left: str, right: str, equal: bool) -> None:
    assert whole_number(left) is not None
    assert whole_number(right) is not None
    assert (last_number(left) == whole_number(right)) is equal
    assert (last_number(right) == whole_number(left)) is equal


LISTS = ["1,2", "0,1", "(0,1)", "12,34", "1,000,00", "0,123", "1,2345", "1.2.3", "1/2/2024", "12\u200934"]
FORMULAS = ["10^5", "x^2", "10\u00b2", r"\sqrt{2}", "\u221a2", r"3\pi", r"\frac{\pi}{2}", r"\frac{1}{x}", "3 7/2"]
BROKEN = ["1/0", r"\frac{1}{0}", "1e9999999999", "1" * 300 + "/3", "", "none", "-", "$"]


@pytest.mark.parametrize("text", [*LISTS, *FORMULAS, *BROKEN])
def test_what_would_be_read_wrongly_reads_as_no_number(text: str) -> None:
    assert last_number(text) is None
    assert whole_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5", "5"),
        ("First 7, then 12.", "12"),
        ("It is 1, 2", "2"),
        ("The answer is -7.", "-7"),
        ("5-7", "7"),  # a dash after a digit takes away
        ("(3)-4", "4"),
        ("5 -7", "-7"),
        ("so ...5", "5"),  # an ellipsis is no decimal point
        ("12 345", "345"),  # an ordinary space parts numbers
        ("12cm", "12"),
        ("#### 1,200", "1200"),
        ("10^2 = 100", "100"),
        ("3 apples\n\n**4**\n", "4"),
        ("costs $3.50!", "3.5"),
        ("1,2 no, 3", "3"),
    ],
)
def test_the_last_number_of_running_text_is_read(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["5 apples", "2 + 3 = 5", "x = 4", "1, 2", "forty"])
def test_a_text_with_more_than_a_number_is_not_wholly_one(text: str) -> None:
    assert whole_number(text) is None


@settings(max_examples=50)
@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_equality_is_that_of_fractions(left: Fraction, right: Fraction) -> None:
    assert (last_number(str(left)) == last_number(str(right))) == (left == right)
    assert last_number(f"{left.numerator * 3}/{left.denominator * 3}") == whole_number(str(left))


@settings(max_examples=50)
@given(st.integers(), st.integers(0, 10**9), st.booleans())
def test_grouping_and_trailing_zeros_change_nothing(whole: int, part: int, grouped: bool) -> None:
    text = f"{whole:,}" if grouped else str(whole)
    assert last_number(f"= {text}.{part:09d}000") == Decimal(f"{whole}.{part:09d}")


@settings(max_examples=200)
@given(st.text(alphabet="0123456789.,/-+eE^${}\\ fracsqt\u2009\u00b2\u22121", max_size=40))
def test_no_text_raises_and_whole_numbers_are_last_numbers(text: str) -> None:
    whole = whole_number(text)
    assert whole is None or whole == last_number(text)


LONG = 10**5
REPEATED = ["1,", "1.", "1/", "1 1/", "\\frac{", "\\frac{1}", "-$", "1e", "1 /", " ", "("]


@pytest.mark.parametrize("text", [*(part * LONG + "1" for part in REPEATED), "1" + ",000" * LONG, "1" + " " * LONG])
def test_long_answers_take_linear_time(text: str) -> None:
    # about a microsecond a character; a quadratic reading of 10^5 characters would take minutes
    started = time.process_time()
    last_number(text)
    whole_number(text)
    assert time.process_time() - started < 5.0


def test_a_million_digits_are_compared_to_the_last_one() -> None:
    nines = "9" * 10**6  # read as digits: as a binary number it would take minutes
    assert last_number(nines) == last_number(nines + ".0")
    assert last_number(nines) != last_number(nines[:-1] + "8")
