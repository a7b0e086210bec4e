import re
from collections import Counter

import pytest

from core.config import ArithmeticConfig
from core.errors import UserError
from data.arithmetic import _PLAIN, _SEVERAL, make_arithmetic

pytestmark = pytest.mark.fast


def numbers_in(text: str) -> tuple[int, int]:
    a, b = re.findall(r"\d+", text)
    return int(a), int(b)


def test_answers_are_the_sum_or_the_difference_of_the_two_numbers():
    made = make_arithmetic(ArithmeticConfig(num_prompts=600, num_heldout=60), seed=3)
    for row in made.train + made.heldout:
        a, b = numbers_in(row.question)
        assert int(row.answer) == (a + b if row.family.startswith("sum") else a - b), row


def test_only_bare_differences_and_temperatures_end_below_zero():
    rows = make_arithmetic(ArithmeticConfig(num_prompts=1000, num_heldout=60), seed=0).train
    negative = {row.family for row in rows if int(row.answer) < 0}
    assert negative == {"difference-plain", "difference-temperature"}


def test_at_least_eight_families_share_the_rows_evenly_on_both_sides():
    made = make_arithmetic(ArithmeticConfig(num_prompts=205, num_heldout=64), seed=0)
    train, heldout = (Counter(row.family for row in rows) for rows in (made.train, made.heldout))
    assert len(train) == 10
    # 205 over ten families: 20 or 21 each; 64: 6 or 7 each
    assert set(train.values()) == {20, 21}
    assert set(heldout.values()) == {6, 7}
    assert train.keys() == heldout.keys()


def test_heldout_questions_are_never_trained_and_ids_are_unique():
    made = make_arithmetic(ArithmeticConfig(num_prompts=2000, num_heldout=500), seed=1)
    asked, held = ({row.question for row in rows} for rows in (made.train, made.heldout))
    assert not asked & held
    assert (len(asked), len(held)) == (2000, 500)
    assert len({row.row_id for row in made.train + made.heldout}) == 2500
    assert made.notes == ()


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    config = ArithmeticConfig(num_prompts=100, num_heldout=20)
    assert make_arithmetic(config, 5) == make_arithmetic(config, 5)
    assert make_arithmetic(config, 5).train != make_arithmetic(config, 6).train


def test_plain_sums_are_worded_exactly_as_the_benchmark_task():
    config = ArithmeticConfig(num_prompts=50, num_heldout=10, operations=("+",), phrasings="plain")
    for row in make_arithmetic(config, 0).train:
        a, b = numbers_in(row.question)
        assert row.messages == (("user", f"What is {a} + {b}? Reply with the number only."),)
        assert 0 <= a <= 20
        assert 0 <= b <= 20


def test_questions_repeat_under_new_ids_where_too_few_exist_and_a_note_says_so():
    # Operands 0..2: 9 plain sums; 2 held out leave 7 to train on, asked for 20
    config = ArithmeticConfig(num_prompts=20, num_heldout=2, max_operand=2, operations=("+",), phrasings="plain")
    made = make_arithmetic(config, 0)
    assert len(made.train) == len({row.row_id for row in made.train}) == 20
    times = Counter(row.question for row in made.train)
    assert len(times) == 7
    assert set(times.values()) == {2, 3}  # 20 = 6 x 3 + 1 x 2
    assert not set(times) & {row.question for row in made.heldout}
    assert "20 asked for, 7 different questions exist beside the 2 held out" in made.notes[0]


def test_more_heldout_rows_than_questions_are_refused_with_the_number_that_fits():
    config = ArithmeticConfig(num_prompts=1, num_heldout=9, max_operand=2, operations=("+",), phrasings="plain")
    with pytest.raises(UserError, match=r"num_heldout must be at most 8, got 9: 9 different questions"):
        make_arithmetic(config, 0)
    assert len(make_arithmetic(config.model_copy(update={"num_heldout": 8}), 0).heldout) == 8


def test_every_index_of_a_family_is_another_pair_within_the_bounds():
    # Operands 0..3: 16 pairs in the square, 10 with a >= b
    for family, count in ((_SEVERAL[0], 16), (_SEVERAL[5], 10)):
        pairs = {family.operands(index, 3) for index in range(family.num_questions(3))}
        assert len(pairs) == family.num_questions(3) == count
        assert all(0 <= b <= 3 and 0 <= a <= 3 and (family.negative or a >= b) for a, b in pairs)
    assert set(_PLAIN) <= set(_SEVERAL)


def test_huge_operands_cost_no_time():
    rows = make_arithmetic(ArithmeticConfig(num_prompts=30, num_heldout=10, max_operand=10**9), 0).train
    assert len({row.question for row in rows}) == 30
